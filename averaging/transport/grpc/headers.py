"""What a call says in its headers, since the message of its method is not this project's to extend."""

from __future__ import annotations

import re
from collections.abc import Iterable

from averaging.protocol.group import MAX_GROUP_SIZE
from averaging.protocol.messages import Resume

RESUME = "averaging-resume"
"""What of a state is there already: the number of bytes, a space, and the fingerprint of their tensors in hexadecimal
digits."""

MIN_GROUP_SIZE = "averaging-min-group-size"
"""The least number of members of a group in which the caller takes part, in decimal digits, from 2 to 4096."""

_RESUME = re.compile(r"([0-9]{1,18}) ([0-9a-f]{64})")


_NUMBER = re.compile(r"[1-9][0-9]{0,3}")


def of_resume(resume: Resume | None) -> tuple[tuple[str, str], ...]:
    """The headers of a download."""
    return ((RESUME, f"{resume.offset} {resume.fingerprint.hex()}"),) if resume else ()


def read_resume(headers: Iterable[tuple[str, str | bytes]]) -> Resume | None:
    """What the caller of a download has; None if it does not say so in a way that is understood."""
    match = _match(_RESUME, RESUME, headers)
    return Resume(int(match[1]), bytes.fromhex(match[2])) if match else None


def of_min_group_size(members: int) -> tuple[tuple[str, str], ...]:
    """The headers of a request to join; without one it is 2."""
    return ((MIN_GROUP_SIZE, str(members)),) if 2 < members <= MAX_GROUP_SIZE else ()


def read_min_group_size(headers: Iterable[tuple[str, str | bytes]]) -> int:
    """The least group in which the caller takes part; 2 if it does not say so in a way that is understood."""
    match = _match(_NUMBER, MIN_GROUP_SIZE, headers)
    return int(match[0]) if match and 2 <= int(match[0]) <= MAX_GROUP_SIZE else 2


def _match(pattern: re.Pattern[str], header: str, headers: Iterable[tuple[str, str | bytes]]) -> re.Match[str] | None:
    """What one header says; None if it is missing, repeated, or written otherwise."""
    told = [value for name, value in headers if name == header]
    return pattern.fullmatch(told[0]) if len(told) == 1 and isinstance(told[0], str) else None
