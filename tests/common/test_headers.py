"""What calls say in their headers."""

from dataclasses import replace

import pytest

from averaging.protocol.messages import JoinRequest, Resume
from averaging.transport.grpc.channel_options import (
    JOINS_PARTS,
    LARGE_PARTS,
    MIN_GROUP_SIZE,
    NAMES,
    of_join,
    of_resume,
    read_join,
    read_resume,
)

PLAIN = JoinRequest("192.0.2.1:1", b"hash", 1.0, b"", False, 2, "", False)
DIGEST = "12-0123456789abcdef"


HAS = Resume(10, bytes(range(32)))
[HEADER] = of_resume(HAS)


@pytest.mark.parametrize("further", [[HEADER], [(HEADER[0], "11 " + "00" * 32)], [(HEADER[0], "")]])
def test_who_says_twice_what_it_has_is_given_all(further: list[tuple[str, str]]) -> None:
    assert read_resume([("other", ""), HEADER]) == HAS
    assert read_resume([HEADER, *further]) is None
    assert read_resume([*further, HEADER]) is None


@pytest.mark.parametrize("members", [2, 3, 4096])
@pytest.mark.parametrize("names", ["", DIGEST])
@pytest.mark.parametrize(("joins", "large"), [(False, False), (True, False), (True, True)])
def test_a_join_request_comes_as_it_was_sent(members: int, names: str, joins: bool, large: bool) -> None:
    request = replace(PLAIN, min_group_size=members, names=names, joins_parts=joins, large_parts=large)
    assert read_join(PLAIN, [("other", "7"), *of_join(request)]) == request


def test_nothing_is_said_of_a_size_that_nobody_would_believe() -> None:
    assert of_join(replace(PLAIN, min_group_size=4097)) == of_join(PLAIN) == ()


SIZES = [[], ["1"], ["-3"], ["4097"], ["03"], ["3 "], ["3.0"], [""], ["\u0663"], ["3", "3"], [b"3"], ["3" * 5000]]
DIGESTS = [[], [DIGEST] * 2, ["0-0123456789abcdef"], ["12-0123456789ABCDEF"], ["12"], [b"x"], ["1" * 5000]]
FLAGS = [["0"], ["1", "1"], ["2"], ["true"], [b"1"], [""]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (name, values)
        for name, wrong in ((MIN_GROUP_SIZE, SIZES), (NAMES, DIGESTS), (JOINS_PARTS, FLAGS), (LARGE_PARTS, FLAGS))
        for values in wrong
    ],
)
def test_what_is_malformed_or_repeated_counts_as_not_said(name: str, values: list[str | bytes]) -> None:
    assert read_join(PLAIN, [(name, value) for value in values]) == PLAIN
