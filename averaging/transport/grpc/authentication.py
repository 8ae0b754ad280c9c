"""Who may call: TLS between peers, the run's tokens, and names that callers may use."""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar

import grpc
from cryptography import x509

from averaging.common.addresses import CLIENT_PREFIX, covers, is_endpoint, parse_address
from averaging.config import Inspection
from averaging.errors import BusyError, ForeignEndpointError, WrongRunError
from averaging.security.client_names import fits, is_bound
from averaging.security.credentials import Credentials, Tls, validity_problem
from averaging.transport.grpc import methods
from averaging.transport.grpc.channel_options import MAX_CALLS_PER_HOST
from averaging.transport.grpc.methods import Method
from averaging.transport.grpc.refused_callers import Refusals
from averaging.transport.grpc.unread_replies import UnreadReplies

Request = TypeVar("Request")

HEADER = "authorization"
"""The metadata in which a token travels, as `Bearer TOKEN`."""

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""Answered without a token: whoever watches over machines has none."""

_INSPECTION = ("/grpc.reflection.", "/grpc.channelz.", f"/{methods.STATUS}/", methods.LIST_RECORDS.path)

_CLAIMS: dict[Method[Any, Any], Callable[[Any], str]] = {
    methods.JOIN_GROUP: lambda request: str(request.endpoint),
    methods.AGGREGATE_PART: lambda message: str(message.endpoint),
    methods.EXCHANGE: lambda digest: str(digest.endpoint),
    methods.SUBSCRIBE: lambda digest: str(digest.endpoint),
}
"""What a request says about who sends it. Of a record in `Push` its signature tells, see `discovery.certified`."""

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """For the listening side: callers without a certificate of an authority are turned away.

    Each connection has a configuration of its own, and with it a key of its own for session tickets, so that nobody can
    resume a session: a resumed one does not show the caller's certificate again, which may have expired meanwhile.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(tls.key_pem, tls.certificate_pem)], tls.ca_pem)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """For the calling side; gRPC compares the certificate of whom it reaches with the host that it dials."""
    return grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.certificate_pem)


def call_metadata(tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    return ((HEADER, f"Bearer {tokens[0]}"),) if tokens else ()


def is_token(value: str | bytes, tokens: Sequence[str]) -> bool:
    """Whether a header carries one of the tokens; it takes the same time whichever it is, or none."""
    raw = value if isinstance(value, bytes) else value.encode(errors="replace")
    scheme, _, given = raw.partition(b" ")
    digest = sha256(given.strip()).digest()
    matches = [hmac.compare_digest(digest, sha256(token.encode()).digest()) for token in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def needs_token(path: str, inspection: Inspection) -> bool:
    """Whether a method is for token holders, where a run has tokens."""
    return path != HEALTH_CHECK and not (inspection is Inspection.ON and path.startswith(_INSPECTION))


def denial(path: str, headers: Sequence[tuple[str, str | bytes]], credentials: Credentials) -> str | None:
    """Why a call is refused, for its caller; None if it is not."""
    if not credentials.tokens or not needs_token(path, credentials.inspection):
        return None
    given = [value for name, value in headers if name == HEADER]
    if any(is_token(value, credentials.tokens) for value in given):
        return None
    told = "and the one that was sent is not one of this run's" if given else "and none was sent"
    return f"this run wants a token, {told}; it goes in the metadata as 'authorization: Bearer TOKEN'"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets in the calls that carry a token, where the run has tokens; of every service, and of unknown ones."""

    def __init__(self, credentials: Credentials, refusals: Refusals) -> None:
        self._credentials = credentials
        self._refusals = refusals

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called before the handler of each call."""
        headers = handler_call_details.invocation_metadata or ()
        words = denial(handler_call_details.method, list(headers), self._credentials)
        if words is None:
            return await continuation(handler_call_details)
        refusal = words

        async def deny(_: object, context: Context) -> None:
            self._refusals.note(host_of(context), refusal)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        # Of this shape whatever the method's: it needs no message to answer.
        return grpc.stream_stream_rpc_method_handler(deny)


class Callers:
    """Who calls: how many calls of one host are in progress, and which endpoints it may call its own.

    Attributes:
        refusals: of whatever calls.
        unread: the replies to them that are on their way.
    """

    def __init__(self, *, authenticated: bool, max_calls_per_host: int = MAX_CALLS_PER_HOST) -> None:
        self.refusals = Refusals()
        self.unread = UnreadReplies()
        self._authenticated = authenticated
        self._most = max_calls_per_host
        self._calls: Counter[str] = Counter()

    @contextmanager
    def call(self, context: Context) -> Iterator[None]:
        """Around a call in progress.

        Raises:
            BusyError: its host has too many.
        """
        host = host_of(context)
        if self._calls[host] >= self._most:
            raise BusyError(f"{self._calls[host]} calls of your host are in progress; no more are taken")
        self._calls[host] += 1
        try:
            yield
        except WrongRunError as error:
            self.refusals.note(host, str(error))
            raise
        finally:
            self._calls[host] -= 1
            if not self._calls[host]:
                del self._calls[host]

    def read(self, method: Method[Request, Any], context: Context) -> Callable[[bytes], Request]:
        """What decodes the messages of a call, and checks in whose name they are.

        Raises:
            ForeignEndpointError: from the returned function, if its certificate does not stand for that endpoint, or
                has expired since the connection was made.
            ProtocolViolationError: likewise, if a message is malformed.
        """
        claim = _CLAIMS.get(method) if self._authenticated else None
        if claim is None:
            return method.read_request

        def decode(raw: bytes) -> Request:
            request = method.read_request(raw)
            endpoint = claim(request)
            try:
                check_claim(endpoint, certified_hosts(context), lambda: certificate_of(context))
                # Whoever is in a group was let in while it was valid, and to end the round is no offence.
                if endpoint and method is not methods.AGGREGATE_PART:
                    check_validity(endpoint, context)
            except ForeignEndpointError as error:  # of which not all methods make a refusal of the call
                self.refusals.note(host_of(context), f"it {error}")
                raise
            return request

        return decode


def host_of(context: Context) -> str:
    """The address from which somebody calls, without the port."""
    return context.peer().rpartition(":")[0]


def certified_hosts(context: Context) -> list[str]:
    """The hosts for which the certificate of a caller stands."""
    told = context.auth_context()
    return [raw.decode(errors="replace") for kind in ("peer_dns", "peer_ip") for raw in told.get(kind, ())]


def certificate_of(context: Context) -> x509.Certificate | None:
    """The certificate of a caller; None on a connection without TLS."""
    pems = context.auth_context().get("x509_pem_cert", ())
    return next(map(_certificate, pems), None)


def check_claim(endpoint: str, hosts: Sequence[str], certificate: Callable[[], x509.Certificate | None]) -> None:
    """Whether a caller may call itself `endpoint`. A malformed name is refused later, by the service that is called.

    Args:
        endpoint: the claimed name.
        hosts: the hosts for which the caller's certificate stands.
        certificate: returns the caller's certificate; called only for the names of clients, which have no host.

    Raises:
        ForeignEndpointError: it may not.
    """
    if endpoint.startswith(CLIENT_PREFIX):
        owner = certificate()
        if is_bound(endpoint) and (owner is None or not fits(endpoint, owner)):
            raise ForeignEndpointError(f"calls itself {endpoint}, a name that belongs to another certificate's key")
        return
    if is_endpoint(endpoint) and not covers(hosts, parse_address(endpoint)[0]):
        told = ", ".join(hosts) or "no host"
        raise ForeignEndpointError(f"calls itself {endpoint}, but its certificate stands for {told}")


def check_validity(endpoint: str, context: Context) -> None:
    """Whether the certificate of a caller that calls itself `endpoint` is still valid: a connection may last for weeks.

    Its records are believed no longer, so whoever took it into a group would spoil that for all the others.

    Raises:
        ForeignEndpointError: it is not.
    """
    certificate = certificate_of(context)
    if certificate is not None and (problem := validity_problem(certificate, time.time())):
        raise ForeignEndpointError(f"calls itself {endpoint}, but its certificate {problem}")


@lru_cache(maxsize=256)
def _certificate(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)
