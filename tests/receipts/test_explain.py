"""Receipts in words, of one peer and of several, and `averaging explain`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st

from averaging.cli import main
from averaging.receipts.explanation import describe, explain, merge
from averaging.receipts.receipt import Account, DropCode, Dropped, Outcome, Receipt, Straggler
from averaging.receipts.receipt_log import dumps
from tests.receipts.made import SILENT, A, B, C, D, receipt, receipts
from tests.support.pages import ROOT

WELL = "round 17: 4 of 4 in 2.50 s (all-reduce 1.50 s)"
WITHOUT_D = "round 17: 3 of 4 in 2.50 s (all-reduce 1.50 s)"
NO_GROUP = Receipt(
    3, Outcome.NO_GROUP, "no other peer is in the run", seconds=60.0, run_id="demo", endpoint=A, started=1.7e9
)


def line(*told: Receipt) -> str:
    (one,) = merge(told)
    return describe(one, {A, B, C} if len(told) > 1 else {A})


def test_one_receipt() -> None:
    assert line(receipt()) == WELL
    assert line(receipt(topic="momentum/3")).startswith("round 17 of momentum/3: 4 of 4")
    assert line(receipt(dropped=(SILENT,))) == (
        f"{WITHOUT_D}; 10.0.0.7:5001 dropped, sent nothing for 4.1 s, deadline 4.0 s = 3 × its median"
    )
    assert line(NO_GROUP) == "round 3: no group after 60.0 s: no other peer is in the run"
    assert line(receipt(outcome=Outcome.CANCELLED, reason="x")) == "round 17: cancelled after 2.5 s: x"
    assert line(receipt(outcome=Outcome.FAILED, reason="x")) == "round 17: failed after 2.5 s: x"
    assert line(receipt(straggler=Straggler(B, 0.94, "averages"), kept_local=7)) == (
        f"{WELL}; waited 0.9 s for the averages of {B}; 7 elements kept the local value"
    )
    said = "CLAMPED: 12 values sent or averaged exceed what the compression can hold and were cut to its largest number"
    assert line(receipt(clamped=12)).startswith(f"{WELL}; {said}; look for diverging tensors, or use bfloat16")
    accounts = (Account(A, age=0, discount=1.0), Account(B, age=9, discount=0.63), Account(C, age=1), Account(D))
    assert line(receipt(accounts=accounts)) == f"{WELL}; {B} 9 steps late, weight × 0.63; {C} 1 step late"


def test_several_peers_agree_or_differ() -> None:
    assert line(*(receipt(name) for name in (A, B, C))) == f"{WELL}; all 3 agree"
    other = receipt(C)
    accounts = tuple(
        replace(account, digest="ffffffff") if account.endpoint == B else account for account in other.accounts
    )
    assert line(receipt(A), receipt(B), replace(other, accounts=accounts)) == (
        f"{WELL}; DIFFERENT AVERAGES of {B}: 00000002 at {A}, {B}, ffffffff at {C}"
    )
    # What only one has whole cannot be compared.
    lacking = tuple(replace(account, digest="") for account in receipt().accounts)
    told = line(receipt(A), receipt(B, accounts=lacking))
    assert "agree" not in told
    assert "DIFFERENT" not in told


def test_whom_most_others_have_dropped_accuses_nobody() -> None:
    frozen = receipt(
        C,
        outcome=Outcome.FAILED,
        reason="all other members were lost",
        dropped=tuple(Dropped(name, "silence", DropCode.SILENT) for name in (A, B)),
        members=(A, B, C),
        accounts=(),
    )
    others = [receipt(name, members=(A, B, C), dropped=(Dropped(C, "silent for 4 s"),)) for name in (A, B)]
    assert line(*others, frozen) == (
        "round 17: 2 of 3 in 2.50 s (all-reduce 1.50 s); 10.0.0.3:5001 failed after 2.5 s: all other members were "
        "lost; 10.0.0.3:5001 dropped, silent for 4 s; all 2 agree"
    )


def test_a_peer_whose_receipt_is_missing_is_named() -> None:
    (one,) = merge([receipt(A), receipt(B)])
    assert describe(one, {A, B, C}).endswith(f"no receipt of {C}")
    assert describe(one, {A, B}).endswith("all 2 agree")


def test_peers_that_count_differently_and_receipts_that_come_twice() -> None:
    group = {"group_id": b"x" * 20}
    told = [receipt(A, 3, **group), receipt(A, 3, **group), receipt(B, 17, **group)]
    (one,) = merge(told)
    assert len(one.receipts) == 2
    assert describe(one).startswith("round 3/17: ")


def test_the_lines_of_the_page() -> None:
    rounds: list[tuple[int, float, float, dict[str, Any]]] = [
        (16, 0.91, 0.84, {}),
        (17, 5.12, 5.02, {"dropped": (Dropped.overdue(D, "sent nothing", 4.12, 4.0, "4 × its median of 1 s"),)}),
        (18, 2.73, 2.64, {"straggler": Straggler(C, 1.8, "parts")}),
    ]
    told = [
        receipt(
            name,
            number,
            seconds=seconds,
            allreduce_seconds=reduced,
            phases={"looking": seconds - reduced, "allreduce": reduced},
            started=1.7637204e9 + 60 * number,
            state="5f04c2a1",
            **more,
        )
        for number, seconds, reduced, more in rounds
        for name in (A, B, C)
    ]
    page = (ROOT / "docs" / "operate" / "receipts.md").read_text()
    assert "\n".join(["```text", *explain(told), "```"]) in page


def test_what_it_comes_to() -> None:
    told = [
        NO_GROUP,
        *(receipt(name, 4, dropped=(SILENT,)) for name in (A, B)),
        *(receipt(name, 5, dropped=(Dropped(D, "gone", DropCode.CONNECTION_LOST),)) for name in (A, B)),
        *(receipt(name, 6, straggler=Straggler(D, seconds, "parts")) for name, seconds in ((A, 0.5), (B, 0.75))),
    ]
    lines = list(explain(told))
    assert lines[0] == (f"run demo, receipts of {A}, {B}, from 2023-11-14 22:13:20 to 2023-11-14 22:14:22 UTC")
    assert [text.split(":")[0] for text in lines[1:5]] == [f"round {number}" for number in (3, 4, 5, 6)]
    assert lines[5:] == [
        "total of 4 rounds: 3 averaged, 1 without a group",
        f"dropped: {D} in 2 rounds (silent 1, connection lost 1)",
        "slowest phase: allreduce, 9.00 s of 15.0 s (60%; median 1.50 s)",
        "last to arrive: no peer regularly",
        f"straggler: {D} in 1 round, maximum 0.8 s, total 0.8 s",
        "bytes: 18.0 MiB sent, 12.0 MiB received",
        "averages: the same in all of 3 rounds that can be compared, 3 of them only between some of the members",
        "states: no round has receipts of several peers to compare",
    ]
    assert list(explain(told, summary_only=True)) == [lines[0], *lines[5:]]
    for apart in list(explain([receipt(A, 4), receipt(B, 5)]))[-2:]:
        assert apart.endswith("s: no round has receipts of several peers to compare")
    assert list(explain([receipt(A, 4), receipt(B, 4), receipt(A, 5)]))[-2].endswith("; 1 cannot")


def test_equal_averages_of_different_states_are_not_called_the_same() -> None:
    """As of gradients, where peers began with different parameters."""
    told = [receipt(A, 4, state="aa"), receipt(B, 4, state="bb"), receipt(A, 5, state="cc"), receipt(B, 5, state="cc")]
    lines = list(explain(told))
    assert f"DIFFERENT STATES: aa at {A}, bb at {B}" in lines[1]
    assert "agree" not in lines[1]
    assert "all 2 agree" in lines[2]
    partly = ", 2 of them only between some of the members"
    assert lines[-3:] == [
        f"averages: the same in all of 2 rounds that can be compared{partly}",
        f"states: DIFFERENT in 1 of 2 rounds that can be compared{partly}",
        "last states: the same at all 2 that say it",
    ]
    assert list(explain(told[:3]))[-1] == f"last states: DIFFERENT, by the last receipt of each: bb at {B}; cc at {A}"


def told_of_straggler(shares: Sequence[float], rounds: int, held: int) -> str:
    """The hint about D, if there is one."""
    accounts = tuple(Account(name, share=share) for name, share in zip((A, B, C, D), shares, strict=True))
    straggler = Straggler(D, 0.5, "parts")
    told = [receipt(A, n, accounts=accounts, straggler=straggler if n < held else None) for n in range(rounds)]
    return "\n".join(text for text in explain(told, summary_only=True) if text.startswith("hint"))


def test_a_narrow_link_is_suspected_where_shares_do_not_match_it() -> None:
    equal, matching = (0.25,) * 4, (1 / 3, 1 / 3, 1 / 3, 0.0)
    assert told_of_straggler(equal, 4, 2) == (
        f"hint: {D} reduces as much as the others; if its link is slower, set `bandwidth` at every peer to that of its "
        "own link"
    )
    assert not told_of_straggler(equal, 4, 1)
    assert not told_of_straggler(equal, 1, 1)
    assert not told_of_straggler(matching, 4, 4)


@given(st.lists(receipts, max_size=4))
def test_any_receipts_are_printable_lines(told: list[Receipt]) -> None:
    assert all(text.isprintable() for text in explain(told))


def run(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], input=stdin)


def test_files_are_put_together(tmp_path: Path) -> None:
    for name in (A, B):
        (tmp_path / name).write_text(dumps(receipt(name)) + "\n")
    result = run(tmp_path / A, tmp_path / B)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert f"{WELL}; all 2 agree" in result.stdout.splitlines()
    assert WELL in run("-", stdin=dumps(receipt())).stdout.splitlines()
    assert WELL not in run(tmp_path / A, "--summary").stdout


def test_bad_lines_are_reported_with_their_numbers_and_the_rest_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("")
    assert run(file).stdout == "no receipts: there was no round\n"
    file.write_text(dumps(receipt()) + "\n" + dumps(receipt())[:99])
    result = run(file)
    assert (result.exit_code, WELL in result.stdout) == (0, True)
    assert "a.jsonl: the last line is incomplete" in result.stderr
    file.write_text("\n".join([dumps(receipt()), "\x1b[2J", *["{}"] * 7]) + "\n")
    result = run(file)
    assert result.exit_code == 2
    assert WELL in result.stdout
    assert "a.jsonl: line 2: it is not JSON" in result.stderr
    assert "line 6" in result.stderr
    assert "and 3 more lines" in result.stderr
    assert "8 lines that cannot be read are missing above" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("content", ['{"event": "ready"}\n{"event": "done"}\n', "\x00\x01\n", "\x00\x01", "{}"])
def test_what_is_no_file_of_receipts(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other"
    file.write_text(content)
    result = run(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "other is not a file of receipts: line 1: it is not" in result.stderr
