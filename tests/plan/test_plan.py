"""The plan of a run, beside what was measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from averaging.cli import main
from averaging.common import duration
from averaging.errors import ConfigError
from averaging.plan import DAY, PeerLink, RunPlan, StrategyKind, compare, estimate, memory_of_peer, parse_dtype
from averaging.protocol import COMPRESSIONS, CompressionType, TopK
from averaging.receipts import Account, Outcome, Receipt
from averaging.receipts.receipt_log import dumps
from tests.support.receipts import receipt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks/results"
RUN = RunPlan(parameters=1 << 20, peers=4, link=PeerLink(100e6, 0.04), sync_every=10, step_seconds=(0.5,))


def measured() -> list[Any]:
    cases = json.loads((BENCHMARKS / "wan_lane.json").read_text())["cases"]
    return [
        pytest.param(case, name.split()[1], id=f"{case['title']}, {name}")
        for case in cases
        if not case["uneven"]
        for name in case["systems"]
        if name.startswith("averaging ")
    ]


@pytest.mark.parametrize(("case", "code"), measured())
def test_an_all_reduce_takes_what_was_measured_on_emulated_links(case: dict[str, Any], code: str) -> None:
    peers, rate, trip = (float(word.split()[0]) for word in case["title"].split(", ")[:3])
    rounds = [one for one in case["systems"][f"averaging {code}"]["rounds"] if not one["warm_up"]]
    # The machine has two cores, of which the relay of the emulated links takes up to 0.6 at 4 Gbit/s in all.
    cores = (2 - 0.6 * peers / 4 * rate / 1000) / peers
    run = RunPlan(
        parameters=case["mib"] << 18,
        peers=int(peers),
        link=PeerLink(rate * 1e6, trip / 1000),
        compression=COMPRESSIONS[code],
        strategy=StrategyKind.LOCAL_SGD,
        cores=cores,
    )
    assert estimate(run).phases["allreduce"] == pytest.approx(
        statistics.median(one["allreduce_seconds"] for one in rounds), rel=0.15
    )


def test_bytes_are_those_of_the_shards_that_others_reduce_and_of_the_own_shard() -> None:
    assert estimate(RUN).bytes_sent == 2 * 3 / 4 * (4 << 20)
    assert estimate(replace(RUN, compression=CompressionType.BLOCKWISE_INT8)).bytes_sent == 2 * 3 / 4 * (1 << 20)
    halves = replace(RUN, dtype=torch.bfloat16)
    assert estimate(halves).bytes_sent == estimate(RUN).bytes_sent  # the change of half-precision parameters is float32
    assert estimate(replace(halves, strategy=StrategyKind.LOCAL_SGD)).bytes_sent == 2 * 3 / 4 * (2 << 20)
    assert estimate(replace(RUN, fragments=5)).bytes_sent == pytest.approx(2 * 3 / 4 * (4 << 20) / 5)
    statistics_too = replace(RUN, strategy=StrategyKind.LOCAL_SGD, statistics_averaged=True)
    assert estimate(statistics_too).bytes_sent == 2 * 3 / 4 * 3 * (4 << 20)


SPARSE = replace(RUN, compression=CompressionType.TOP_K, parameters=1 << 22)


def test_bytes_of_top_k_are_contributions_up_and_replies_down() -> None:
    contribution = (1 << 22) / 64 * 14 / 8
    result = estimate(SPARSE)
    assert result.contributed == 3 / 4 * contribution
    assert result.bytes_sent == 3 / 4 * contribution * (1 + 4)  # replies hold the contributions of all four
    many = replace(SPARSE, peers=32)
    union = (1 << 22) * (1 - (63 / 64) ** 32 + 1 / 8)  # a bit for each element, a byte for those that are sent
    assert estimate(many).bytes_sent == pytest.approx(31 / 32 * (contribution + union))
    halves = replace(SPARSE, fragments=2)
    assert estimate(halves).bytes_sent == pytest.approx(result.bytes_sent / 2)


def recorded() -> list[Any]:
    rows = json.loads((BENCHMARKS / "codecs.json").read_text())["sparse"]["rows"]
    return [
        pytest.param(row, int(members), id=f"1/{1 / row['density']:g}, {row['bits']} bits, {members}")
        for row in rows
        for members in row["replies"]
    ]


@pytest.mark.parametrize(("row", "members"), recorded())
def test_top_k_takes_the_processor_as_long_as_was_measured(row: dict[str, Any], members: int) -> None:
    top_k, reply = TopK(row["density"], row["bits"]), row["replies"][str(members)]
    run = replace(SPARSE, parameters=10**9, peers=members, top_k=top_k)
    assert estimate(run).coding == pytest.approx(reply["seconds_of_a_billion"], rel=0.2)
    assert estimate(run).coding < 14.5
    replies = 8 * run.reply_bytes / run.parameters
    assert replies == pytest.approx(reply["bits_a_weight"], rel=0.02)
    assert 8 * run.contribution_bytes / run.parameters == pytest.approx(row["bits_a_weight"], rel=0.03)


def test_top_k_is_for_changes() -> None:
    for strategy in (StrategyKind.LOCAL_SGD, StrategyKind.GRADIENT_AVERAGING):
        with pytest.raises(ConfigError, match="top_k sends changes of many steps, so that it is for diloco"):
            replace(SPARSE, strategy=strategy)


def test_with_top_k_the_residual_takes_the_place_of_outer_momentum() -> None:
    dense, sparse = memory_of_peer(RUN), memory_of_peer(replace(RUN, compression=CompressionType.TOP_K))
    assert set(dense) - set(sparse) == {"outer momentum"}
    assert set(sparse) - set(dense) == {
        "residual of what was not sent",
        "the next residual, until a result is applied",
    }
    assert sparse["residual of what was not sent"] == dense["outer momentum"]
    assert memory_of_peer(replace(SPARSE, peers=32))["residual of the replies"] == (1 << 24) // 32


def test_a_day_is_rounds_and_the_steps_between_them() -> None:
    whole = estimate(RUN)
    assert whole.waited == whole.seconds
    assert whole.rounds_per_day * (10 * 0.5 + whole.seconds) == pytest.approx(DAY)
    assert whole.share_not_training == pytest.approx(whole.seconds / (10 * 0.5 + whole.seconds))
    assert whole.cost_per_day(0.5) == pytest.approx(whole.bytes_per_day / 1e9 * 0.5)


def test_training_goes_on_during_a_delayed_round() -> None:
    assert estimate(replace(RUN, delay=9)).waited == 0
    short = estimate(replace(RUN, delay=1, link=PeerLink(10e6, 0.04)))
    assert short.waited == pytest.approx(short.seconds - 0.5)


def test_fast_peers_wait_for_the_slowest_but_not_with_gradient_averaging() -> None:
    unequal = replace(RUN, step_seconds=(0.5, 0.5, 0.5, 2.0))
    assert estimate(unequal).waited == pytest.approx(estimate(RUN).seconds + 10 * 1.5)
    gradients = replace(unequal, strategy=StrategyKind.GRADIENT_AVERAGING)
    assert estimate(gradients).waited == pytest.approx(estimate(replace(gradients, step_seconds=(0.5,))).waited)


def test_memory_is_that_of_the_strategy_and_its_options() -> None:
    diloco = memory_of_peer(RUN)
    training = ("parameters", "gradients", "statistics of the optimizer", "parts under way")
    added = sum(count for what, count in diloco.items() if what not in training)
    assert added == 9 * (4 << 20)  # measured 8.6, docs/design/performance.md
    assert added - diloco["copy for newcomers, while one downloads"] == 4 * (4 << 20)  # measured 3.5
    plain = memory_of_peer(replace(RUN, strategy=StrategyKind.LOCAL_SGD, share_state=False))
    overlapped = memory_of_peer(replace(RUN, strategy=StrategyKind.LOCAL_SGD, share_state=False, delay=10))
    assert sum(overlapped.values()) - sum(plain.values()) == 4 << 20
    assert sum(memory_of_peer(replace(RUN, error_feedback=True)).values()) - sum(diloco.values()) == 4 << 20


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peers": 1}, "2 to 4096 peers"),
        ({"fragments": 3}, "multiple of their number"),
        ({"delay": 10}, "delay must be less"),
        ({"delay": 1, "strategy": StrategyKind.GRADIENT_AVERAGING}, "waits for each round"),
        ({"statistics_averaged": True}, "only local_sgd"),
        ({"step_seconds": (1.0, 2.0)}, "for each of 4 peers"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(RUN, **change)


def test_links_and_dtypes_are_read() -> None:
    assert PeerLink.parse("300Mbit/40ms") == PeerLink(300e6, 0.04)
    assert PeerLink.parse("1.5 Gbit/s / 5 ms") == PeerLink(1.5e9, 0.005)
    assert PeerLink.parse("512kbit") == PeerLink(512e3)
    assert parse_dtype("bf16") is parse_dtype("BFloat16") is torch.bfloat16
    for wrong in ("300", "300MB/40ms", "0Mbit/1ms", "-3Mbit"):
        with pytest.raises(ConfigError, match="300Mbit/40ms"):
            PeerLink.parse(wrong)
    with pytest.raises(ConfigError, match="bf16"):
        parse_dtype("int8")


def as_planned(run: RunPlan, **changes: Any) -> Receipt:
    planned = estimate(run)
    members = tuple(f"10.0.0.{number}:1" for number in range(run.peers))
    return replace(
        receipt(),
        outcome=Outcome.AVERAGED,
        members=members,
        accounts=tuple(map(Account, members)),
        bytes_sent=int(planned.bytes_sent),
        phases={name: seconds + 0.01 for name, seconds in planned.phases.items()},
        seconds=planned.seconds + 0.04,
        **changes,
    )


def test_receipts_that_differ_from_the_plan_say_where() -> None:
    assert not [each for each in compare(RUN, [as_planned(RUN)] * 3) if each.remark]
    planned = as_planned(RUN)
    late = replace(planned, phases={**planned.phases, "looking": 3.0}, members=planned.members[:3])
    remarks = {each.what: each.remark for each in compare(RUN, [late, late, planned]) if each.remark}
    assert remarks.keys() == {"looking"}
    assert "arrive late" in remarks["looking"]
    fewer = {each.what: each.remark for each in compare(RUN, [replace(late, bytes_sent=1)]) if each.remark}
    assert fewer["bytes sent"] == "the groups had 3 members"
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(RUN, [replace(planned, outcome=Outcome.FAILED)])


def run_command(*options: str) -> Result:
    return CliRunner().invoke(main, ["plan", *options])


def test_the_command_prints_the_plan_a_table_and_the_comparison(tmp_path: Path) -> None:
    options = ["--parameters", "1048576", "--peers", "4", "--link", "100Mbit/40ms", "--sync-every", "10"]
    options += ["--step-seconds", "0.5"]
    text = run_command(*options, "--price", "0.05").stdout
    assert f"seconds of a round: {duration(estimate(RUN).seconds)}" in text
    assert len([line for line in text.splitlines() if line.startswith(tuple(StrategyKind))]) == 10
    values = json.loads(run_command(*options, "--price", "0.05", "--json").stdout)
    assert values["bytes_per_round"] == estimate(RUN).bytes_sent
    assert values["cost_per_day"] == pytest.approx(estimate(RUN).cost_per_day(0.05))
    receipts = tmp_path / "a.jsonl"
    receipts.write_text(dumps(as_planned(RUN)) + "\n")
    assert "allreduce: " in run_command(*options, "--receipts", str(receipts)).stdout
    assert run_command(*options, "--receipts", str(tmp_path / "none")).exit_code == 2
    assert "300Mbit/40ms" in run_command("--parameters", "9", "--link", "3").stderr


def test_averages_of_top_k_that_are_shorter_than_planned_are_explained() -> None:
    planned = as_planned(SPARSE)
    shorter, longer = (replace(planned, bytes_sent=int(planned.bytes_sent * share)) for share in (0.7, 1.3))
    assert "the members changed the same elements" in compare(SPARSE, [shorter])[0].remark
    assert "other tensors" in compare(SPARSE, [longer])[0].remark


def test_the_command_knows_top_k() -> None:
    options = ["--parameters", "1e9", "--compression", "top_k", "--density", "1/32", "--bits", "4", "--peers", "16"]
    text = run_command(*options).stdout
    assert "of contributions, " in text
    assert "the code takes 10.3 s of a core" in text
    assert "residual of the replies" in text
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith(tuple(StrategyKind))]
    assert [strategy for strategy, code in rows if code == "top_k"] == ["diloco"]
    values = json.loads(run_command(*options, "--json").stdout)
    assert values["contributed_per_round"] == 15 / 16 * 1e9 / 32 * 2
    assert values["coding_seconds"] == pytest.approx(10.3, abs=0.1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--density", "0"], "density, the share of the elements that is sent, must be above 0 and at most 1, not 0.0"),
        (["--density", "1/0"], "'1/0' is no number; write it as 1/64 or 0.0156"),
        (["--bits", "3"], "'3' is not one of '2', '4', '8'"),
        (["--strategy", "local_sgd"], "top_k sends changes of many steps, so that it is for diloco"),
    ],
)
def test_wrong_options_of_top_k_are_named(options: list[str], complaint: str) -> None:
    result = run_command("--parameters", "1e6", "--compression", "top_k", *options)
    assert result.exit_code == 2
    assert complaint in result.output


def test_rounds_by_the_clock_wait_for_no_slow_peer() -> None:
    peers = ("--parameters", "1e6", "--peers", "3", "--json", "--link", "1Gbit/1ms")
    by_clock = json.loads(run_command(*peers, "--step-seconds", "0.5,0.5,2", "--sync-every", "120s").output)
    alike = json.loads(run_command(*peers, "--step-seconds", "0.5", "--sync-every", "240").output)
    assert by_clock == alike
    by_steps = json.loads(run_command(*peers, "--step-seconds", "0.5,0.5,2", "--sync-every", "240").output)
    assert by_steps["share_not_training"] > 0.7 > 0.05 > by_clock["share_not_training"]


@pytest.mark.parametrize("value", ["0", "0s", "-1", "ten", "1.5", ""])
def test_a_sync_every_that_is_neither_steps_nor_a_time_is_refused(value: str) -> None:
    result = run_command("--parameters", "1e6", "--sync-every", value)
    assert result.exit_code == 2
    assert "is neither a number of steps, at least 1, nor a time such as 120s" in result.output.replace("\n", " ")


def test_gradient_averaging_by_the_clock_is_refused() -> None:
    result = run_command("--parameters", "1e6", "--strategy", "gradient_averaging", "--sync-every", "10s")
    assert result.exit_code == 2
    assert "is a number of batches, not a time" in result.output
