"""Errors that grpcio causes or logs and that mean nothing, dropped from the log."""

from __future__ import annotations

import logging

POLLER = "PollerCompletionQueue._handle_events"
"""Where an event loop reads that gRPC has news."""


class _LostEnds(logging.Filter):
    """Drops an error of gRPC's own log: a caller disconnected while its call ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record stays in the log."""
        return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


class _LateWakeUps(logging.Filter):
    """Drops an error of asyncio's log: an event loop was woken for gRPC, and there was nothing to read any more.

    All event loops of a process share one pair of sockets, over which gRPC wakes them. Another loop may have read the
    event before, or may have closed the sockets with the last object of grpc.aio (grpcio 1.85).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record stays in the log."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OSError):
            return True
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace is None or not trace.tb_frame.f_code.co_name.endswith(POLLER)


_FILTERS = {"grpc._cython.cygrpc": _LostEnds(), "asyncio": _LateWakeUps()}


def quieten() -> None:
    """Drops these errors from now on, in the whole process."""
    for name, one in _FILTERS.items():
        logging.getLogger(name).addFilter(one)  # once: a logger has a filter only one time
