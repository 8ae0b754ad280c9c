"""All errors of this library. A message says what happened, to which peer or file, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_TEXT = 4000
"""Characters of a message. Longer messages are cut."""


class AveragingError(Exception):
    """The base of all errors of this library; the others are in `averaging.errors`.

    The message is one printable line of limited length, because other peers may have written parts of it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(AveragingError, ValueError):
    """An invalid argument: a malformed address, a negative weight, a run id with a dot.

    Attributes:
        option: name of the option that is invalid; empty if the message is not about one option.
    """

    def __init__(self, message: str = "", option: str = "") -> None:
        super().__init__(message)
        self.option = option


class TensorError(AveragingError, ValueError):
    """A tensor that cannot be averaged: an integer dtype, or NaN and infinity where they are refused."""


class SchemaMismatchError(AveragingError):
    """Another peer of the run averages different tensors, or has different options for the same tensors.

    Attributes:
        endpoint: the peer that differs.
        difference: a description of the first difference.
    """

    def __init__(self, endpoint: str, difference: str) -> None:
        super().__init__(f"{endpoint} averages something else: {difference}; give both the same tensors and options")
        self.endpoint = endpoint
        self.difference = difference


class PeersMissingError(AveragingError, TimeoutError):
    """Fewer peers than required started to train in the run in time.

    Attributes:
        peers: The endpoints of all known peers, including those that do not train.
    """

    def __init__(self, count: int, seconds: float, peers: Collection[str]) -> None:
        super().__init__(
            f"fewer than {count} peers train in the run after {seconds:g} s; known are {', '.join(sorted(peers))}. "
            "Start the others, check their run id and addresses, or wait longer."
        )
        self.peers = frozenset(peers)


class ListenError(AveragingError, OSError):
    """The peer cannot listen on its address, usually because the port is taken."""


class TransportError(AveragingError):
    """A call to another peer failed.

    Attributes:
        endpoint: the peer that was called.
        reason: what the transport said.
        definite: whether the configurations of the two peers exclude each other, so that a retry would fail too.
    """

    def __init__(self, endpoint: str, reason: str, *, definite: bool = False) -> None:
        super().__init__(_of(endpoint, reason))
        self.endpoint = endpoint
        self.reason = printable(reason)
        self.definite = definite


class PeerUnreachableError(TransportError):
    """No peer answers at the endpoint, or the connection broke.

    Attributes:
        refused: whether the connection was refused because nothing listens there.
        unknown_host: whether the host has no address.
        unconnected: whether no connection came about at all, so that the address may be wrong.
    """

    def __init__(
        self,
        endpoint: str,
        reason: str,
        *,
        refused: bool = False,
        unknown_host: bool = False,
        unconnected: bool = False,
        definite: bool = False,
    ) -> None:
        super().__init__(endpoint, reason, definite=definite)
        self.refused = refused
        self.unknown_host = unknown_host
        self.unconnected = unconnected or refused or unknown_host


class CallRefusedError(TransportError):
    """The peer refused this call."""


class NotServedError(CallRefusedError):
    """The peer does not serve the method: it has other software, another release, or has it switched off."""


class UnauthenticatedError(CallRefusedError):
    """The run of the peer requires a token, and this peer has none, or one of another run. The reason says which."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(endpoint, reason, definite=True)


class WrongRunError(CallRefusedError):
    """The peer belongs to another run."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(endpoint, reason, definite=True)


class BusyError(AveragingError):
    """This peer serves the maximum number of calls. The caller should call another peer, or retry later."""


class ProtocolViolationError(AveragingError):
    """A peer broke the protocol.

    Attributes:
        endpoint: the peer, with which the message begins; empty if the message does not name it.
        reason: the message without the endpoint.
    """

    def __init__(self, reason: str = "", endpoint: str = "") -> None:
        super().__init__(f"{endpoint} {reason}" if endpoint else reason)
        self.endpoint = endpoint
        self.reason = printable(reason)


class UnprovenViolationError(ProtocolViolationError):
    """The protocol was broken, either by a member or by the peer that relayed its message; it is not known which."""


class LyingLeaderError(AveragingError):
    """A leader announced different groups to its members, so the round has no valid result."""


class NonFiniteError(ProtocolViolationError):
    """A peer sent NaN or infinity where they are refused."""


class ForeignEndpointError(ProtocolViolationError):
    """A peer uses an endpoint that its certificate does not cover."""


class RoundError(AveragingError):
    """A round that cannot produce an average, for example because the weights of its members sum to zero."""


class DriftError(AveragingError):
    """This peer differs from most peers of its run although it should not, and `on_drift` is "raise"."""


class SiteError(AveragingError):
    """The ranks of a site can no longer go the same way: one is lost, was interrupted, or has failed half-way.

    Every process of the site has to end. torchrun starts the site again, which then takes over the run's state.
    """


class DiscoveryError(AveragingError):
    """Discovery refused a record: it is too large, it has expired, or there are too many."""


class NoSeedAnsweredError(DiscoveryError):
    """None of the peers given to join answered in time.

    Args:
        hint: a further sentence about the cause.

    Attributes:
        reasons: the reason for each seed.
    """

    def __init__(self, reasons: Mapping[str, str], seconds: float, hint: str = "") -> None:
        text = (
            f"none of the {len(reasons)} peers to join answered within {seconds:g} s ({_listed(reasons)}). "
            "Check the addresses and that a peer of this run is up; without --join this peer starts a run of its own."
        )
        super().__init__(f"{text} {hint}" if hint else text)
        self.reasons = dict(reasons)


class JoinRefusedError(NoSeedAnsweredError):
    """All peers given to join belong to another run, require another token, or have certificates of another authority.

    A retry fails as well until one side is configured differently.
    """

    def __init__(self, reasons: Mapping[str, str], hint: str = "") -> None:
        text = (
            f"this peer and those to join cannot be in one run as they are configured ({_listed(reasons)}). "
            "Change what the reasons name and start this peer again."
        )
        DiscoveryError.__init__(self, f"{text} {hint}" if hint else text)
        self.reasons = dict(reasons)


class StateError(AveragingError):
    """No donor delivered a valid state. Nothing was changed locally.

    Attributes:
        gone: the asked donors at whose endpoint nothing listens any more.
        unconnected: whether no connection came about to one of the asked donors, so that an address may be wrong.
    """

    def __init__(self, message: str, gone: Collection[str] = (), *, unconnected: bool = False) -> None:
        super().__init__(message)
        self.gone = frozenset(gone)
        self.unconnected = unconnected


class ClosedError(AveragingError):
    """The peer is not running: it was not entered with `async with`, or was closed."""


class FeedError(AveragingError):
    """A feed cannot continue: a registration does not match, the server has forgotten a batch, or a rank has died."""


class FeedRefusedError(FeedError):
    """The feed server refused a request, and would refuse it again.

    Attributes:
        status: the HTTP status, for example 422.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FeedBusyError(FeedError):
    """The feed server cannot take this request now; the same request can succeed later.

    Attributes:
        status: the HTTP status, for example 503; 0 if no answer came.
        retry_after: seconds to wait before the next request.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class FeedUnreachableError(FeedError):
    """The feed server gave no usable answer within the time limit of the caller."""


class WorkerError(AveragingError):
    """A model worker could not carry out a request.

    Attributes:
        worker: the name of the worker.
        request: the kind of the request, for example `train_step`; empty if it is not about one request.
    """

    def __init__(self, worker: str, message: str, request: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.request = request


class WorkerLostError(WorkerError):
    """A model worker has died, cannot be reached, or has restarted and lost what it held."""


class MasterRefusedError(WorkerError):
    """A model worker refuses a master: another one is attached, or its plan does not match the worker."""


class DataLostError(WorkerError):
    """Samples that a call needs were held by a lost worker alone."""


class SyncTimeoutError(AveragingError, TimeoutError):
    """No new state came to a synchronizer while an explorer waited for one."""


class WeightGroupError(AveragingError):
    """Trainers and explorers cannot transfer weights in a group of torch.distributed: a member is missing or failed."""


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(_of(seed, reason) for seed, reason in reasons.items())


def _of(endpoint: str, reason: str) -> str:
    """Puts the endpoint before the reason, unless the reason begins with it."""
    return reason if reason.startswith((f"{endpoint} ", f"{endpoint}: ")) else f"{endpoint}: {reason}"


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Makes text of another peer safe for logs and terminals.

    Args:
        text: any text.
        most: maximum number of characters of the result.

    Returns:
        One line without control characters.
    """
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(map(_harmless, text))


def _harmless(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else "?"
