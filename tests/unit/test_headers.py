"""What calls say in their headers."""

from __future__ import annotations

import pytest

from averaging.protocol.messages import Resume
from averaging.transport.grpc.headers import (
    MIN_GROUP_SIZE,
    of_min_group_size,
    of_resume,
    read_min_group_size,
    read_resume,
)

HAS = Resume(10, bytes(range(32)))
[HEADER] = of_resume(HAS)


@pytest.mark.parametrize("further", [[HEADER], [(HEADER[0], "11 " + "00" * 32)], [(HEADER[0], "")]])
def test_who_says_twice_what_it_has_is_given_all(further: list[tuple[str, str]]) -> None:
    assert read_resume([("other", ""), HEADER]) == HAS
    assert read_resume([HEADER, *further]) is None
    assert read_resume([*further, HEADER]) is None


@pytest.mark.parametrize("members", [2, 3, 10, 4096])
def test_the_least_group_comes_as_it_was_configured(members: int) -> None:
    assert read_min_group_size([("other", "7"), *of_min_group_size(members)]) == members


def test_nothing_is_said_of_a_size_that_nobody_would_believe() -> None:
    assert of_min_group_size(4097) == of_min_group_size(2) == ()


@pytest.mark.parametrize(
    "values",
    [
        [], ["1"], ["0"], ["-3"], ["4097"], ["99999"], ["03"], ["3 "], ["3.0"], ["1e1"], ["x"], [""], ["\u0663"],
        ["3", "3"], ["3", "4"], [b"3"], ["3" * 5000],
    ],
)  # fmt: skip
def test_what_is_no_size_counts_as_not_said(values: list[str | bytes]) -> None:
    assert read_min_group_size([(MIN_GROUP_SIZE, value) for value in values]) == 2
