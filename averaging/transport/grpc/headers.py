"""Headers of calls, for data that the messages of the wire contract have no field for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from averaging.protocol.group import MAX_GROUP_SIZE
from averaging.protocol.messages import JoinRequest, Resume

RESUME = "averaging-resume"
"""The part of a state that the caller has: number of bytes, space, fingerprint of their tensors in hexadecimal."""

MIN_GROUP_SIZE = "averaging-min-group-size"
"""Minimum number of members of a group in which the caller takes part, in decimal, from 2 to 4096."""

NAMES = "averaging-names"
"""What the caller's tensors are named: number of names, a dash, a digest of 16 hexadecimal digits."""

_RESUME = re.compile(r"([0-9]{1,18}) ([0-9a-f]{64})")
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_NAMES = re.compile(r"[1-9][0-9]{0,8}-[0-9a-f]{16}")


def of_resume(resume: Resume | None) -> tuple[tuple[str, str], ...]:
    """Returns the headers of a download."""
    return ((RESUME, f"{resume.offset} {resume.fingerprint.hex()}"),) if resume else ()


def read_resume(headers: Iterable[tuple[str, str | bytes]]) -> Resume | None:
    """Reads the part of the state that the caller has; None if the header is missing or malformed."""
    match = _match(_RESUME, RESUME, headers)
    return Resume(int(match[1]), bytes.fromhex(match[2])) if match else None


def of_join(request: JoinRequest) -> tuple[tuple[str, str], ...]:
    """Returns the headers of a join request. Without them the minimum is 2, and the tensors have no names."""
    size = ((MIN_GROUP_SIZE, str(request.min_group_size)),) if 2 < request.min_group_size <= MAX_GROUP_SIZE else ()
    return (*size, (NAMES, request.names)) if request.names else size


def read_names(headers: Iterable[tuple[str, str | bytes]]) -> str:
    """Reads the digest of the names of the caller's tensors; empty if the header is missing or malformed."""
    match = _match(_NAMES, NAMES, headers)
    return match[0] if match else ""


def read_min_group_size(headers: Iterable[tuple[str, str | bytes]]) -> int:
    """Reads the caller's minimum group size; 2 if the header is missing or malformed."""
    match = _match(_NUMBER, MIN_GROUP_SIZE, headers)
    return int(match[0]) if match and 2 <= int(match[0]) <= MAX_GROUP_SIZE else 2


def _match(pattern: re.Pattern[str], header: str, headers: Iterable[tuple[str, str | bytes]]) -> re.Match[str] | None:
    """Matches the value of a header; None if it is missing, repeated or malformed."""
    values = [value for name, value in headers if name == header]
    return pattern.fullmatch(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
