"""The examples, as a reader runs them, with fewer steps."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import examples.explorers.__main__ as explorers
import examples.sites.__main__ as sites
from examples import adapters, digits, diloco, epoch, three_lines
from tests.examples.running import ROOT, example


@pytest.mark.long
def test_unequal_peers_one_of_them_a_client_learn_the_digits_and_end_with_the_same_bytes() -> None:
    with example("digits", "--peers", "3", "--steps", "20") as peers:
        printed = peers.end(0)
    rows = re.findall(r"│ (\d+) +│ (\d+) +│ (\w+) +│ (\d+) +│ ([\d.]+)% +│ (\w+) +│", printed)
    assert [(number, size, mode) for number, size, mode, *_ in rows] == [
        ("1", "64", "node"),
        ("2", "32", "node"),
        ("3", "16", "client"),
    ]
    assert all(int(samples) > 0 for *_, samples, _, _ in rows)
    # Guessing is right in a tenth of the cases.
    assert all(float(accuracy) > 75 for *_, accuracy, _ in rows)
    assert len({digest for *_, digest in rows}) == 1
    assert "All parameters and running statistics are the same bytes." in printed
    for peer in (1, 2, 3):
        assert re.search(rf"peer {peer}: Global step 20: \d+ samples", printed)


@pytest.mark.long
def test_two_peers_make_the_same_outer_steps_and_tensorboard_shows_the_rounds(tmp_path: Path) -> None:
    arguments = ["--wait-for=2", "--steps=60", "--sync-every=20", f"--tensorboard={tmp_path}"]
    with example("diloco", *arguments) as founder:
        endpoint = founder.read_until("--join ").split("--join ")[1]
        with example("diloco", "--join", endpoint, *arguments) as newcomer:
            printed = [newcomer.end(0), founder.end(0)]
    results = set()
    for lines in printed:
        assert lines.count("averaged with 1 other ") == 3
        assert "3 outer steps so far" in lines
        results.update(re.findall(r"Done: ([\d.]+) bits per byte", lines))
    assert len(results) == 1  # after the last outer step there was none of one's own
    assert float(results.pop()) < 5.0  # an untrained model needs more than 8
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        events = EventAccumulator(str(folder)).Reload()
        assert [event.value for event in events.Scalars("round/members")] == [2, 2, 2]
        assert all(event.value > 0 for event in events.Scalars("round/bytes_sent"))
        assert all(event.value > 0 for event in events.Scalars("round/seconds"))
        assert [event.value for event in events.Scalars("averaging/local_step")] == [20, 40, 60]
        assert [event.step for event in events.Scalars("loss/own text")] == list(range(1, 61))
        assert [event.step for event in events.Scalars("loss/held-out text")] == [20, 40, 60]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "most", "bits"),
    [
        # 440,000 parameters at 14 / 32 bits are 24 KB, of which half go to the other peer, and half come back; an
        # untrained model needs more than 8 bits per byte
        (["--optimizer=muon", "--compression=top_k", "--density=1/32"], 50, 7.5),
        (["--compression=visible", "--lr=1e-6"], 500, 9.0),
    ],
    ids=["the largest changes", "what engines can see"],
)
def test_two_peers_send_a_part_of_their_changes(arguments: list[str], most: float, bits: float) -> None:
    common = [*arguments, "--steps=60", "--sync-every=20"]
    with example("diloco", "--wait-for=2", *common) as founder:
        endpoint = founder.read_until("--join ").split("--join ")[1]
        with example("diloco", "--join", endpoint, *common) as newcomer:
            printed = [newcomer.end(0), founder.end(0)]
    for lines in printed:
        assert lines.count("averaged with 1 other ") == 3
        assert "all 2 peers hold the same weights" in lines
        sent = [float(size) for size in re.findall(r"([\d.]+) KiB out", lines)]
        assert (len(sent), max(sent) < most) == (3, True), sent  # float32: 1,700
    [result] = set(re.findall(r"Done: ([\d.]+) bits per byte", "".join(printed)))
    assert float(result) < bits


@pytest.mark.long
def test_explorers_follow_a_trainer_and_one_is_killed_and_comes_back_and_the_reward_rises(tmp_path: Path) -> None:
    plot = tmp_path / "folder" / "plot.png"
    with example("explorers", "--steps=30", f"--plot={plot}") as explored:
        printed = explored.end(0)
    assert re.search(r"killed.*started again.*step +30: reward +\d", printed, re.DOTALL)
    [(first, last)] = re.findall(r"The mean reward rose from (\d+) to (\d+)", printed)
    assert int(first) < 60
    assert int(last) > 2 * int(first)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_peers_share_an_epoch() -> None:
    with example("epoch", "--epochs=1", "--wait-for=2") as founder:
        endpoint = founder.read_until("--join").split()[-1]
        with example("epoch", "--epochs=1", "--wait-for=2", "--join", endpoint) as other:
            shares = [re.search(r"Trained here: (\d+)", each.read_until("Trained here")) for each in (founder, other)]
            assert sum(int(share[1]) for share in shares if share) == epoch.SAMPLES
            assert all("all 2 peers hold the same weights" in each.end(0) for each in (founder, other))


@pytest.mark.long
def test_three_lines_find_each_other_and_leave_in_order_after_ctrl_c() -> None:
    with example("three_lines", "--steps=10000000") as founder:
        endpoint = founder.read_until("--join ").split("--join ")[1]
        with example("three_lines", "--steps=10000000", "--join", endpoint) as newcomer:
            for peer in (newcomer, founder):
                peer.read_until("1 other peers")
            for peer in (newcomer, founder):
                peer.process.send_signal(signal.SIGINT)
                assert peer.end(130).endswith("Stopped.\n")


@pytest.fixture
def threads_as_they_were() -> Iterator[None]:
    """The examples decide how many threads torch has; other tests in this process have as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("threads_as_they_were")
def test_a_peer_that_is_alone_comes_to_the_end_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    digits.main(["--steps=3", "--batch-size=32", "--target-batch-size=64", f"--save={tmp_path / 'model'}"])
    assert "Global step 3: 192 samples of this peer's" in capsys.readouterr().out
    assert (tmp_path / "model").exists()
    published, arguments = tmp_path / "run", ["--fragments=2", "--delay=1", "--alpha=0.5", "--compression=float16"]
    diloco.main(["--steps=5", "--sync-every=4", *arguments, f"--publish-to={published}"])
    assert '"version":2,' in (published / "index.json").read_text()
    printed = capsys.readouterr().out
    assert "step 5: " in printed
    assert "2 outer steps so far" in printed
    # In a process of its own, at whose end it leaves.
    with example("three_lines", "--steps=100") as plain:
        plain.end(0)


Main = Callable[[list[str]], None]


@pytest.mark.parametrize(
    ("main", "arguments", "told"),
    [
        (digits.main, "--steps 0", "argument --steps: must be a whole number above 0, not '0'"),
        (digits.main, "--peers 2 --join 127.0.0.1:1", "remove --join, --advertise and --save"),
        (digits.main, "--save nowhere/model", "there is no folder nowhere"),
        (digits.main, "--client-mode", "--client-mode needs --join"),
        (diloco.main, "--fragments 30 --sync-every 30", "use at most 24"),
        (three_lines.main, "--join nowhere", "'nowhere' is not an address; give HOST:PORT"),
    ],
)
@pytest.mark.usefixtures("threads_as_they_were")
def test_what_cannot_work_is_said_in_one_line(
    main: Main, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"usage: python -m examples\.\w+ \[options\]", usage)
    assert told in line


@pytest.mark.parametrize(
    ("main", "arguments", "module", "extra"),
    [
        (digits.main, [], "sklearn.datasets", "examples"),
        (diloco.main, ["--tensorboard=runs"], "torch.utils.tensorboard", "tensorboard"),
    ],
)
@pytest.mark.usefixtures("threads_as_they_were")
def test_a_missing_package_is_named_with_its_remedy(
    main: Main, arguments: list[str], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=re.escape(f"python -m pip install '.[{extra}]'")):
        main(arguments)


def test_the_commands_of_the_page_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    modules = (adapters, digits, diloco, epoch, explorers, sites, three_lines)
    mains: dict[str, Main] = {module.__name__.split(".")[1]: module.main for module in modules}
    pages = "".join((ROOT / "docs" / "how-to" / page).read_text() for page in ("examples.md", "gpus.md"))
    commands = re.findall(r"^(?:python|torchrun .*) -m examples\.(\w+)(.*)$", pages, re.MULTILINE)
    assert {name for name, _ in commands} == set(mains)
    for name, arguments in commands:
        with pytest.raises(SystemExit) as ended:
            mains[name]([*arguments.split(), "--help"])  # an option before it that is not known is an error
        assert ended.value.code == 0
        assert f"python -m examples.{name}" in capsys.readouterr().out
