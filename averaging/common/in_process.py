"""Objects with threads and connections, which exist in one process only."""

from __future__ import annotations

from typing import NoReturn

from averaging.errors import ConfigError


class InProcess:
    """Refuses to be copied or pickled, also as a part of something else, such as the `collate_fn` of a DataLoader."""

    _instead = "make another one there"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} holds a thread and connections, so it cannot be copied or pickled; "
            f"{self._instead}. "
            "A DataLoader with the start method spawn or forkserver pickles its dataset, collate_fn and worker_init_fn "
            "for its worker processes: none of these may refer to it, as the method of an object does that holds it"
        )
