"""What a call says in its headers, since the message of its method is not this project's to extend."""

from __future__ import annotations

import re
from collections.abc import Iterable

from averaging.messages import Resume

RESUME = "averaging-resume"
"""What of a state is there already: the number of bytes, a space, and the fingerprint of their tensors in hexadecimal
digits."""

_RESUME = re.compile(r"([0-9]{1,18}) ([0-9a-f]{64})")


def of_resume(resume: Resume | None) -> tuple[tuple[str, str], ...]:
    """The headers of a download."""
    return ((RESUME, f"{resume.offset} {resume.fingerprint.hex()}"),) if resume else ()


def read_resume(headers: Iterable[tuple[str, str | bytes]]) -> Resume | None:
    """What the caller of a download has; None if it does not say so in a way that is understood."""
    told = [value for name, value in headers if name == RESUME]
    match = _RESUME.fullmatch(told[0]) if len(told) == 1 and isinstance(told[0], str) else None
    return Resume(int(match[1]), bytes.fromhex(match[2])) if match else None
