"""The options of one rank of a site: what all ranks must have alike, and what each rank's peer makes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import overload

from averaging.common.addresses import parse_address
from averaging.config import AUTO, PeerConfig
from averaging.errors import ConfigError
from averaging.training.site import Site

OF_ONE_RANK = frozenset(
    {
        *("listen", "advertise", "direct_listen", "direct_advertise"),
        *("tls", "tls_ca", "tls_cert", "tls_key", "token_file", "receipts"),
    }
)
"""Options that may differ between ranks, since these may be on different machines."""


def of_rank(config: PeerConfig, site: Site, leader: str) -> PeerConfig:
    """The options of this rank's peer.

    A rank that leads no site, but owns a peer, joins through the leader as well. It listens at the port of `listen`
    plus the number of its shard, unless that is 0, and keeps a file of receipts of its own. The direct port is chosen
    likewise.

    Args:
        config: as given.
        site: of the rank.
        leader: endpoint of the leader.
    """
    if site.leads:
        return config
    if not site.owns:
        return replace(config, share_state=False, receipts=None)
    receipts = None if config.receipts is None else f"{os.fspath(config.receipts)}.shard{site.shard}"
    return replace(
        config,
        join=[*config.join, leader],
        listen=_shifted(config.listen, site.shard),
        advertise=_shifted(config.advertise, site.shard),
        direct_listen=_shifted(config.direct_listen, site.shard),
        direct_advertise=None if config.direct_advertise is None else config.direct_advertise + site.shard,
        receipts=receipts,
    )


def described(config: PeerConfig, **further: object) -> dict[str, str]:
    """What all ranks of a site must have alike, by name."""
    own = {one.name: repr(getattr(config, one.name)) for one in fields(config) if one.name not in OF_ONE_RANK}
    return own | {name: repr(value) for name, value in further.items()}


def check_alike(descriptions: Sequence[Mapping[str, str]]) -> None:
    """Checks that all ranks of a site were started alike.

    Args:
        descriptions: those of `described`, in the order of the ranks.

    Raises:
        ConfigError: two ranks differ; the message names the first difference.
    """
    for rank, one in enumerate(descriptions):
        for name, value in descriptions[0].items():
            if one[name] != value:
                raise ConfigError(
                    f"the ranks of a site need the same options, but {name} is {value:.200} at rank 0 and "
                    f"{one[name]:.200} at rank {rank}"
                )


@overload
def _shifted(address: str, by: int) -> str: ...
@overload
def _shifted(address: str | None, by: int) -> str | None: ...


def _shifted(address: str | None, by: int) -> str | None:
    """The address with a higher port, unless that is 0."""
    if address is None or address == AUTO:
        return address
    host, port = parse_address(address)
    return f"{host}:{port + by if port else 0}"
