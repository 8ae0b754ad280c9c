"""Peers with other constants than users have: smaller parts, shorter deadlines, other replies."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from averaging.config import PeerConfig
from averaging.protocol import ReplyForm


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfig(PeerConfig):
    part_size_bytes: int = PeerConfig.part_size_bytes  # type: ignore[misc]
    min_stall_timeout: float = PeerConfig.min_stall_timeout  # type: ignore[misc]


NAMES = {field.name for field in fields(TunedConfig)}


def tuned(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a peer or an averager, with all that are options or constants in `config`."""
    given = {name: value for name, value in options.items() if name in NAMES}
    if "reply_form" in given:
        given["reply_form"] = ReplyForm(given["reply_form"])
    return {"config": TunedConfig(**given), **{name: value for name, value in options.items() if name not in NAMES}}
