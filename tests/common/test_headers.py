"""What calls say in their headers."""

from __future__ import annotations

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
    read_joins_parts,
    read_large_parts,
    read_min_group_size,
    read_names,
    read_resume,
)


def request(members: int = 2, names: str = "", joins_parts: bool = False) -> JoinRequest:
    return JoinRequest("192.0.2.1:1", b"hash", 1.0, b"", False, members, names, joins_parts)


HAS = Resume(10, bytes(range(32)))
[HEADER] = of_resume(HAS)


@pytest.mark.parametrize("further", [[HEADER], [(HEADER[0], "11 " + "00" * 32)], [(HEADER[0], "")]])
def test_who_says_twice_what_it_has_is_given_all(further: list[tuple[str, str]]) -> None:
    assert read_resume([("other", ""), HEADER]) == HAS
    assert read_resume([HEADER, *further]) is None
    assert read_resume([*further, HEADER]) is None


@pytest.mark.parametrize("members", [2, 3, 10, 4096])
def test_the_least_group_comes_as_it_was_configured(members: int) -> None:
    assert read_min_group_size([("other", "7"), *of_join(request(members))]) == members


def test_nothing_is_said_of_a_size_that_nobody_would_believe() -> None:
    assert of_join(request(4097)) == of_join(request(2)) == ()


@pytest.mark.parametrize(
    "values",
    [
        [], ["1"], ["0"], ["-3"], ["4097"], ["99999"], ["03"], ["3 "], ["3.0"], ["1e1"], ["x"], [""], ["\u0663"],
        ["3", "3"], ["3", "4"], [b"3"], ["3" * 5000],
    ],
)  # fmt: skip
def test_what_is_no_size_counts_as_not_said(values: list[str | bytes]) -> None:
    assert read_min_group_size([(MIN_GROUP_SIZE, value) for value in values]) == 2


def test_the_digest_of_names_comes_as_it_was_sent() -> None:
    names = "12-0123456789abcdef"
    assert read_names([("other", "7"), *of_join(request(3, names))]) == names


@pytest.mark.parametrize(
    "values",
    [[], ["12-0123456789abcdef"] * 2, ["0-0123456789abcdef"], ["12-0123456789ABCDEF"], ["12"], [b"x"], ["1" * 5000]],
)
def test_what_is_no_digest_of_names_counts_as_not_said(values: list[str | bytes]) -> None:
    assert read_names([(NAMES, value) for value in values]) == ""


@pytest.mark.parametrize("names", ["", "12-0123456789abcdef"])
def test_a_caller_says_whether_it_joins_parts(names: str) -> None:
    assert read_joins_parts(of_join(request(3, names, True)))
    assert not read_joins_parts(of_join(request(3, names)))


@pytest.mark.parametrize("wants", [True, False])
def test_a_caller_says_whether_it_wants_large_parts(wants: bool) -> None:
    sent = of_join(replace(request(3, "", True), large_parts=wants))
    assert read_joins_parts(sent)
    assert read_large_parts(sent) is wants
    assert not read_large_parts([(LARGE_PARTS, "2")])


@pytest.mark.parametrize("values", [["0"], ["1", "1"], ["2"], ["true"], [b"1"], [""]])
def test_what_does_not_say_that_parts_are_joined_counts_as_no(values: list[str | bytes]) -> None:
    assert not read_joins_parts([(JOINS_PARTS, value) for value in values])
