"""Tells when the other end of a connection closes it, while nothing is read from the connection.

An event loop tells that a connection can be read, and what ends it is read last. A peer that does not read, so that TCP
stops the sender, would learn of the end only much later. Linux tells of it at once (EPOLLRDHUP). On other systems such
a peer learns of it when it reads or writes again, or by its own deadlines.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress


class HangUps:
    """Watches connections. It belongs to the event loop in which it is created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, sock: socket.socket, hung_up: Callable[[], None]) -> None:
        """Calls `hung_up` once when the other end closes or resets the connection, until `forget` is called."""
        if self._epoll is not None:
            self._watched[sock.fileno()] = hung_up
            self._epoll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, sock: socket.socket) -> None:
        """Stops watching a connection, before its socket is closed."""
        if self._epoll is not None and self._watched.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def close(self) -> None:
        """Stops watching all connections."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._watched.clear()

    def _ready(self) -> None:
        if self._epoll is None:
            return
        for descriptor, _ in self._epoll.poll(0):
            with suppress(KeyError):
                self._watched[descriptor]()
