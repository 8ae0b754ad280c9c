"""What a member tells its group of its contribution and of its own state, as one typed record each. Pure.

Both travel in the member's `gather`. Peers of other software send neither: their contributions are ordinary ones, and
their state is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

KEY = "averaging/state"  # key in a member's `gather` under which its fingerprint travels

MAX_SAMPLES = 2.0**53
"""Upper limit of one member's samples in a step: discovery would not accept a history with infinitely many."""

MAX_STATED_GRACE = 600.0  # longest grace period in seconds that a member may state
MAX_ENTRIES = 1024  # limit on the digests of one fingerprint; several tensors share one if there are more
ENTRY_BYTES = 2

MAX_NAMES, MAX_TEXT = 64, 64  # limits on the number of hyperparameters, and on the length of their names and values
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a member's strategy says of its contribution to a round, besides its tensors and their weight."""

    samples: Annotated[float, Meta(ge=0, le=MAX_SAMPLES)] | None = None  # behind it, or what counts as such
    unit: Text = ""  # of the weight; empty if it is a plain number
    steps: Count | None = None  # local steps in the contribution
    age: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None  # global steps that it is late; None without a quorum
    discount: Annotated[float, Meta(gt=0, le=1)] | None = None  # factor of its weight because of that
    holds: bool = True  # whether the member holds the state that the round changes, so that it can keep the result
    # members without which no group begins, seconds that it waits for further ones, and that only one has the key
    quorum: tuple[Count, Annotated[float, Meta(ge=0, le=MAX_STATED_GRACE)], bool] | None = None
    lacking: bytes = b""  # of its tensors those without a gradient, one bit each
    base: str = ""  # digest of what an adapter changes
    rounds: Count | None = None  # earlier rounds of the parameters; None if the statistics do not depend on it

    def pack(self) -> dict[str, Any]:
        """The `gather` that states it, without what is as usual."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def read(cls, gathered: object) -> Statement:
        """Reads it from a member's `gather`, also from that of a shard of a site; an ordinary one if it says none."""
        if isinstance(gathered, dict) and "site" in gathered:
            gathered = gathered.get("user")
        return _read(cls, gathered) or cls()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of one member, in short."""

    # the moment of the digests, such as the phase of a round. Only fingerprints of the same moment are compared. Empty
    # if there are no digests.
    moment: Text = ""
    digest: Text = ""  # digest of all tensors, or of a part of each if they are large; 16 hexadecimal digits
    # `ENTRY_BYTES` of the digest of each tensor, in order; of runs of tensors if there are more than `MAX_ENTRIES`
    entries: Annotated[bytes, Meta(max_length=MAX_ENTRIES * ENTRY_BYTES)] = b""
    # two of them differ by about the relative difference of the tensors, on average; finite
    sketch: Annotated[float, Meta(ge=-MAX_SAMPLES, le=MAX_SAMPLES)] = 0.0
    # 0 if the peer began with its own parameters; else 1 + its local step when it last took over a state
    since: Count = 0
    step: Count = 0  # the step at which `hyperparameters` were used
    # those of the optimizer, as text; empty if unknown
    hyperparameters: Annotated[Mapping[Text, Text], Meta(max_length=MAX_NAMES)] = field(default_factory=dict)
    scheduled: Annotated[tuple[Text, ...], Meta(max_length=MAX_NAMES)] = ()  # those that have changed so far


def _read(kind: type[T], packed: object) -> T | None:
    """A record that a stranger has sent, and perhaps more of later releases; None if it is malformed."""
    try:
        return msgspec.convert(packed, kind)
    except (msgspec.ValidationError, RecursionError):
        return None


def attach(gather: Any, fingerprint: Fingerprint) -> Any:
    """A `gather` together with a fingerprint; one that is neither None nor a dict with content stays as it is."""
    if gather is None or (isinstance(gather, dict) and gather):
        return {**(gather or {}), KEY: asdict(fingerprint)}
    return gather


def detach(user: Any) -> tuple[Any, Fingerprint | None]:
    """A member's `gather` without its fingerprint, and the fingerprint; None if it sent none, or a malformed one."""
    if not isinstance(user, dict) or KEY not in user:
        return user, None
    rest = {key: value for key, value in user.items() if key != KEY}
    return rest or None, _read(Fingerprint, user[KEY])


def runs(count: int) -> list[range]:
    """Cuts the numbers of `count` tensors into at most `MAX_ENTRIES` runs of about equal length."""
    pieces = min(count, MAX_ENTRIES)
    return [range(piece * count // pieces, (piece + 1) * count // pieces) for piece in range(pieces)]
