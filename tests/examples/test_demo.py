"""What the demo concludes, and how it divides its text."""

from pathlib import Path

import pytest

from examples.demo.record import Member, Record, judge
from examples.sources import divide


def record(*peers: tuple[float, str], alone: float = 3.0) -> Record:
    """Of a run whose peers ended with these losses and digests; its first peer was killed."""
    first = Member("peer 1", 1)
    first.killed()
    others = [
        Member(f"peer {number}", number, result=loss, sha256=digest) for number, (loss, digest) in enumerate(peers, 2)
    ]
    return Record(100, [first, Member("alone", 1, alone=True, result=alone), *others])


def test_better_with_the_same_bytes_is_good() -> None:
    verdict = judge(record((2.4, "a"), (2.4, "a")))
    assert verdict.good
    assert str(verdict) == (
        "The averaged model is better than the one trained alone: "
        "2.400 against 3.000 bits per byte on held-out text, 20.0 % less."
    )


@pytest.mark.parametrize("loss", [3.0, 3.5, float("nan")])
def test_not_better_is_said_and_not_good(loss: float) -> None:
    verdict = judge(record((loss, "a"), (loss, "a")))
    assert verdict.same_bytes
    assert not verdict.good
    assert "NOT better" in str(verdict)


def test_what_a_killed_peer_had_still_in_its_pipe_does_not_revive_it() -> None:
    peer = Member("peer 1", 1)
    peer.take({"event": "step", "step": 7, "loss": 3.0})
    peer.killed()
    assert peer.take({"event": "step", "step": 8, "loss": 2.0}) is None
    assert (peer.state, peer.step, peer.killed_at) == ("KILLED", 7, 7)


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_parts_and_held_out_text_are_disjoint_and_about_equal(tmp_path: Path, parts: int) -> None:
    files = []
    for number in range(200):
        file = tmp_path / f"{number:03}.py"
        file.write_bytes(b"x" * (number % 13 + 1))
        files.append(file)
    sources = divide(files, parts)
    assert sorted(path for block in (*sources.parts, sources.held_out) for path in block) == files
    assert sources.held_out == tuple(files[7::8])
    assert all(tuple(sorted(block)) == block for block in sources.parts)
    sizes = [sum(path.stat().st_size for path in block) for block in sources.parts]
    assert max(sizes) - min(sizes) <= 2 * 13
