"""What calls say in their headers."""

from __future__ import annotations

import pytest

from averaging.messages import Resume
from averaging.transport.grpc.headers import of_resume, read_resume

HAS = Resume(10, bytes(range(32)))
[HEADER] = of_resume(HAS)


@pytest.mark.parametrize("further", [[HEADER], [(HEADER[0], "11 " + "00" * 32)], [(HEADER[0], "")]])
def test_who_says_twice_what_it_has_is_given_all(further: list[tuple[str, str]]) -> None:
    assert read_resume([("other", ""), HEADER]) == HAS
    assert read_resume([HEADER, *further]) is None
    assert read_resume([*further, HEADER]) is None
