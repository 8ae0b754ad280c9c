"""Admits callers: TLS between peers, the tokens of the run, and the endpoints that a certificate covers."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

import grpc
from cryptography import x509

from averaging.common import CLIENT_PREFIX, HostQuota, covers, is_endpoint, parse_address
from averaging.errors import BusyError, CallRefusedError, ProtocolViolationError, RefusalCause, ViolationKind, printable
from averaging.security import Credentials, Tls, validity_problem
from averaging.transport.grpc import methods
from averaging.transport.grpc.channel_options import MAX_CALLS_PER_HOST
from averaging.transport.grpc.error_mapping import HAS_NO_TOKEN, TO_ALL_OR_NONE

logger = logging.getLogger("averaging.transport")

PERIOD = 60.0  # minimum seconds between two log lines about one host

MAX_HOSTS = 64  # maximum number of hosts logged in one period


class Refusals:
    """Logs refused calls, whose errors only the caller sees otherwise: a line per host and `PERIOD`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}  # time by host, earliest first

    def note(self, host: str, why: str) -> None:
        now = self._clock()
        while self._logged and now - next(iter(self._logged.values())) >= PERIOD:
            del self._logged[next(iter(self._logged))]
        if host in self._logged or len(self._logged) >= MAX_HOSTS:
            return
        self._logged[host] = now
        readable = printable(unquote(host.removeprefix("ipv4:").removeprefix("ipv6:")), 100)
        logger.warning("refused a call from %s: %s", readable, printable(why, 300))


HEADER = "authorization"  # the metadata in which a token travels, as `Bearer TOKEN`
HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # answered without a token, because monitoring has none

_INSPECTION = ("/grpc.reflection.", "/grpc.channelz.", f"{methods.STATUS}/", methods.LIST_RECORDS.path)

_CHECKER: ContextVar[Callable[[str], None]] = ContextVar("_CHECKER")
"""What `claim_checker` returns, for the call that the current task serves."""

Context = grpc.aio.ServicerContext[Any, Any]


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """For the listening side: callers without a certificate of an authority are turned away.

    A caller that resumes a TLS session does not show its certificate again, so `Callers.call` checks its dates. The
    configuration never changes: gRPC uses freed memory if two handshakes meet a change
    (https://github.com/grpc/grpc/issues/36693).
    """
    return grpc.ssl_server_credentials([(tls.key_pem, tls.certificate_pem)], tls.ca_pem, require_client_auth=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.certificate_pem)


def call_metadata(tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return ((HEADER, f"Bearer {tokens[0]}"),) if tokens else ()


def is_token(value: str | bytes, tokens: Sequence[str]) -> bool:
    """Whether a header carries one of the tokens. The comparison takes the same time for every header."""
    raw = value if isinstance(value, bytes) else value.encode(errors="replace")
    scheme, _, given = raw.partition(b" ")
    digest = sha256(given.strip()).digest()
    matches = [hmac.compare_digest(digest, sha256(token.encode()).digest()) for token in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def denial(path: str, headers: Sequence[tuple[str, str | bytes]], credentials: Credentials) -> str | None:
    """Why a call is refused, as text for its caller; None if it is accepted."""
    given = [value for name, value in headers if name == HEADER]
    if path == HEALTH_CHECK or any(is_token(value, credentials.tokens) for value in given):
        return None
    if not credentials.tokens:
        # A peer with a token would refuse the calls of this one, so they would never form a group. Who only looks may.
        accepted = not given or path.startswith(_INSPECTION)
        return None if accepted else f"{HAS_NO_TOKEN}, and one was sent; {TO_ALL_OR_NONE}"
    problem = "and the token that was sent is not one of this run" if given else "and none was sent"
    return f"this run requires a token, {problem}; {TO_ALL_OR_NONE}"


class Callers:
    """Counts the calls in progress of each host, and checks the certificates of callers."""

    def __init__(self, *, authenticated: bool) -> None:
        self.refusals = Refusals()
        self._authenticated = authenticated
        self._calls = HostQuota(math.inf, MAX_CALLS_PER_HOST)

    @contextmanager
    def call(self, context: Context, path: str) -> Iterator[None]:
        host = host_of(context)
        certificate = certificate_of(context) if self._authenticated else None
        hosts = certified_hosts(context) if self._authenticated else []
        # A member joined its group with a valid certificate, and may finish the round with an expired one.
        if self._authenticated and path != methods.AGGREGATE_PART.path:
            problem = validity_problem(certificate, time.time()) if certificate else "is missing"
            if problem:
                self.refusals.note(host, f"its certificate {problem}")
                raise ProtocolViolationError(f"the caller's certificate {problem}", kind=ViolationKind.FOREIGN_ENDPOINT)

        def check(endpoint: str) -> None:
            if not self._authenticated:
                return
            try:
                check_claim(endpoint, hosts)
            except ProtocolViolationError as error:  # some methods report it only within their reply
                self.refusals.note(host, f"it {error}")
                raise

        _CHECKER.set(check)
        if not self._calls.take(host):
            raise BusyError(f"{self._calls.taken_by(host)} calls of your host are in progress; no more are taken")
        try:
            yield
        except CallRefusedError as error:
            if error.cause is RefusalCause.WRONG_RUN:
                self.refusals.note(host, str(error))
            raise
        finally:
            self._calls.leave(host)


def claim_checker() -> Callable[[str], None]:
    """Returns a function that checks an endpoint which the caller uses as its own, also after its call has ended.

    The caller is that of the call which the current task serves.
    """
    return _CHECKER.get()


def host_of(context: Context) -> str:
    return context.peer().rpartition(":")[0]


def certified_hosts(context: Context) -> list[str]:
    properties = context.auth_context()
    return [raw.decode(errors="replace") for kind in ("peer_dns", "peer_ip") for raw in properties.get(kind, ())]


def certificate_of(context: Context) -> x509.Certificate | None:
    pems = context.auth_context().get("x509_pem_cert", ())
    return next(map(_certificate, pems), None)


def check_claim(endpoint: str, hosts: Sequence[str]) -> None:
    """Checks that a caller with a certificate for `hosts` may use `endpoint` as its own; anybody may use a client's.

    The called service refuses malformed names later.
    """
    is_address = is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX)
    if is_address and not covers(hosts, parse_address(endpoint)[0]):
        certified = ", ".join(hosts) or "no host"
        raise ProtocolViolationError(
            f"calls itself {endpoint}, but its certificate is for {certified}", kind=ViolationKind.FOREIGN_ENDPOINT
        )


@lru_cache(maxsize=256)
def _certificate(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)
