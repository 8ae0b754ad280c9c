"""`averaging follow --config`: versions side by side, a link to the newest, and readers that notice nothing."""

import signal
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from averaging import WeightPublisher
from averaging.cli import main
from averaging.cli.files import BaseFolder, VersionedFolders
from tests.support.model_folders import base_folder, load_folder
from tests.support.processes import JsonProcess, averaging_process
from tests.weights.test_weights import Publishing, same, state, stepped


def follow(endpoint: str, output: Path, base: Path, *arguments: str) -> JsonProcess:
    given = ("--output", str(output), "--config", str(base), "--timeout", "20")
    return averaging_process("follow", endpoint, *given, *arguments)


def versions(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir())


def test_the_newest_versions_are_kept_and_readers_of_old_ones_go_on(tmp_path: Path) -> None:
    publisher, weights, output = WeightPublisher(), state(), tmp_path / "now"
    base = base_folder(tmp_path / "base")
    command = f'test -e "$AVERAGING_FILE/config.json" && echo "$AVERAGING_FILE" >> {tmp_path}/told'
    with Publishing(publisher) as endpoint, follow(endpoint, output, base, "--exec", command, "--keep", "2") as process:
        process.expect("ready")
        publisher.publish_now(weights, 1)
        written = process.expect("written")
        assert written["output"] == str(output / "version-1")
        assert written["frozen"] == 0
        assert (output / "newest").readlink() == Path("version-1")
        file = next((output / "newest").resolve().glob("*.safetensors"))
        with safe_open(file, framework="pt") as held:  # a reader that goes on with the version that it has opened
            name = next(iter(held.keys()))
            first = weights[name].clone()
            for version in (2, 3, 4):
                weights = stepped(weights)
                publisher.publish_now(weights, version)
                assert process.expect("written")["version"] == version
                assert versions(output) == ["newest", f"version-{version - 1}", f"version-{version}"]
                assert same(load_folder(output / "newest"), weights)
            assert torch.equal(held.get_tensor(name), first)
            assert held.metadata()["format"] == "pt"
            assert held.metadata()["averaging.version"] == "1"
        process.expect("executed")
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert (tmp_path / "told").read_text().splitlines()[0] == str(output / "version-1")
    assert versions(output) == ["newest", "version-3", "version-4"]


def test_a_command_that_is_started_again_goes_on_from_the_newest_version(tmp_path: Path) -> None:
    publisher, weights, output = WeightPublisher(), state(), tmp_path / "now"
    base = base_folder(tmp_path / "base")
    publisher.publish_now(weights, 1)
    with Publishing(publisher) as endpoint:
        for version, most in ((1, 5 << 20), (1, 0), (2, 400_000)):
            if version > 1:
                weights = stepped(weights)
                publisher.publish_now(weights, version)
            with follow(endpoint, output, base, "--once", "--max-shard-bytes", "500000") as process:
                written = process.expect("written")
                assert process.wait() == 0
            assert (written["version"], written["output"]) == (version, str(output / f"version-{version}"))
            assert written["received"] <= most
            assert same(load_folder(output / "newest"), weights)
        (output / ".version-3.0123abcd.tmp").mkdir()  # as a killed process leaves it
        with follow(endpoint, output, base, "--once") as process:
            process.expect("written")
    assert versions(output) == ["newest", "version-1", "version-2"]


def test_weights_of_another_model_end_the_command(tmp_path: Path) -> None:
    publisher = WeightPublisher()
    publisher.publish_now(state(), 1)
    base = base_folder(tmp_path / "base", {"another": torch.zeros(1)})
    with Publishing(publisher) as endpoint, follow(endpoint, tmp_path / "now", base) as process:
        assert "is no tensor of the model in" in process.expect("error")["message"]
        assert process.wait() == 1
    assert versions(tmp_path / "now") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere"], "there is no directory nowhere"),
        (["--config", "base", "--output", "base"], "which this command has not written"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(tmp_path / "base")
    result = CliRunner().invoke(main, ["follow", "127.0.0.1:1", "--output", "now", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_version_that_is_written_again_replaces_itself(tmp_path: Path) -> None:
    folders = VersionedFolders(tmp_path / "now", BaseFolder(base_folder(tmp_path / "base"), 1000), 2)
    folders.write(1, {"w": torch.zeros(1)}, {})
    folders.write(1, {"w": torch.ones(1)}, {})
    assert load_folder(tmp_path / "now" / "newest")["w"].tolist() == [1.0]
    assert versions(tmp_path / "now") == ["newest", "version-1"]


def test_ctrl_c_while_a_version_is_written_leaves_whole_versions_only(tmp_path: Path) -> None:
    publisher, output = WeightPublisher(), tmp_path / "now"
    weights = {f"w{number}": torch.randn(1 << 20) for number in range(32)}  # 128 MiB
    with Publishing(publisher) as endpoint, follow(endpoint, output, base_folder(tmp_path / "base")) as process:
        process.expect("ready")
        publisher.publish_now(weights, 1)
        while not any(path.name.startswith(".version-1") for path in output.iterdir()):
            time.sleep(0.001)
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert versions(output) in ([], ["newest", "version-1"])
    if versions(output):
        assert same(load_folder(output / "newest"), weights)
