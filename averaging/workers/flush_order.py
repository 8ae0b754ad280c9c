"""The order in which a worker carries out the blocking requests of one flush. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from averaging.workers.payload import Handle, HookName, Payload


@dataclass(frozen=True, slots=True)
class Queued:
    """A blocking request that waits for a flush.

    Attributes:
        handle: Its kind.
        call: Name of the call, or of the model for `initialize`.
        mesh: Number of workers of the model.
        post_hooks: Names of its hooks.
        publishes: Whether it is `empty` and publishes parameters.
        request: The request.
    """

    handle: str
    call: str
    mesh: int
    post_hooks: tuple[str, ...]
    publishes: bool
    request: Payload


def flush_order(queued: Iterable[Queued]) -> list[Queued]:
    """Sorts requests. The order depends on the plan alone and not on the order of arrival, so it is equal everywhere.

    1. Requests that only publish parameters, since others wait for them.
    2. Calls of smaller meshes first, then by name.
    3. Calls with an averaging round, by name. Their mesh does not count, because the same model may have another mesh
       at another site, and two sites that enter two rounds in different orders wait for each other.
    4. Requests that only take parameters, since the calls publish them.
    """
    return sorted(queued, key=_key)


def _key(one: Queued) -> tuple[int, int, str]:
    if one.handle == Handle.EMPTY:
        return (0 if one.publishes else 3), 0, one.call
    if HookName.AVERAGE in one.post_hooks:
        return 2, 0, one.call
    return 1, one.mesh, one.call
