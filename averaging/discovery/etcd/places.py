"""Divides the peers that look for a group under one key into groups, in the order in which etcd hears of them.

Each peer that looks draws a number, which costs one call and conflicts with nobody. The numbers 1 to N are the first
place, N + 1 to 2 N the second, and so on, where N is the size of a group. Peers of one place declare themselves under a
key of its own and watch only that, so with thousands of peers under one key each of them knows N others. In a place the
peer that declared itself first leads: all see that order alike, so nobody asks a peer that will not lead.

A group that begins before its place is full closes it: the numbers begin anew, and its members do not find themselves
divided over two places the next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

from averaging.discovery.etcd.layout import run_prefix
from averaging.transport import KeyValueStore, StoredValue

MAX_READABLE = 200
"""Bytes of a key that is part of the keys of its places; of a longer one its hash is."""

MAX_OVER = 256
"""Places that are remembered after their group has begun."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A place under a key.

    Attributes:
        key: the key of discovery under which its peers meet.
        drawn: the number that this peer drew.
        last: the last number that belongs to this place.
    """

    key: str
    drawn: StoredValue
    last: int


def place_of(key: str, drawn: StoredValue, size: int) -> GroupPlace:
    """The place of a number that was drawn under `key`, for groups of `size`."""
    number = (drawn.writes - 1) // size
    stem = key if len(key.encode()) <= MAX_READABLE else blake2b(key.encode(), digest_size=16).hexdigest()
    return GroupPlace(f"{stem}#{drawn.created:x}.{number:x}", drawn, (number + 1) * size)


class GroupPlaces:
    """The places of one peer.

    All methods that ask etcd raise an AveragingError if it does not answer.
    """

    def __init__(self, run_id: str, store: KeyValueStore) -> None:
        self._prefix, self._store = run_prefix(run_id), store
        self._held: dict[str, GroupPlace] = {}  # of the present searches, by key
        self._over: dict[str, GroupPlace] = {}  # the last ones whose group has begun

    async def take(self, key: str, size: int, lease: int) -> GroupPlace:
        """The place of this peer's search; the same as before if others may still come there."""
        held = self._held.get(key)
        if held is not None and held.last % size == 0 and await self._is_open(key, held):
            return held
        name = self._name(key)
        place = place_of(key, await self._store.draw(name, lease), size)
        over = self._over.pop(key, None)
        if over is not None and over.key == place.key:  # whose group has begun, and nobody has closed it yet
            await self._store.delete_unless_drawn(over.drawn, over.last)
            place = place_of(key, await self._store.draw(name, lease), size)
        self._held[key] = place
        return place

    def leave(self, key: str, *, began: bool) -> GroupPlace | None:
        """Ends a search; `began` says whether a group was found. Returns the place that it had."""
        place = self._held.pop(key, None)
        if place is not None and began:
            self._over[key] = place
            if len(self._over) > MAX_OVER:
                del self._over[next(iter(self._over))]
        return place

    async def close(self, place: GroupPlace) -> None:
        await self._store.delete_unless_drawn(place.drawn, place.last)

    async def _is_open(self, key: str, place: GroupPlace) -> bool:
        values = (await self._store.list_values(self._name(key), 1)).values
        present = values[0] if values and values[0].key == place.drawn.key else None
        return present is not None and present.created == place.drawn.created and present.writes < place.last

    def _name(self, key: str) -> bytes:
        return self._prefix + b"#/" + quote(key, safe=":.[]@+~").encode()
