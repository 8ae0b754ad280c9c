"""All errors of this library. A message says what happened, to which peer or file, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto

MAX_TEXT = 4000
"""Characters of a message. Longer messages are cut."""


SUPPORTED_SYSTEMS = "use Linux, macOS for peers, or WSL 2 on Windows"
"""The remedy on another operating system."""


class AveragingError(Exception):
    """The base of all errors of this library; the others are in `averaging.errors`.

    The message is one printable line of limited length, because other peers may have written parts of it.

    Attributes:
        reason: the message without the endpoint of a peer with which it may begin.
    """

    def __init__(self, message: str = "", reason: str | None = None) -> None:
        super().__init__(printable(message))
        self.reason = str(self) if reason is None else printable(reason)


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


class WaitTimeoutError(AveragingError, TimeoutError):
    """Something did not come about in time: enough peers that train, or a new state for an explorer.

    Attributes:
        peers: The endpoints of all known peers, including those that do not train, if they are waited for.
    """

    def __init__(self, message: str, peers: Collection[str] = ()) -> None:
        super().__init__(message)
        self.peers = frozenset(peers)


class ListenError(AveragingError, OSError):
    """The peer cannot listen on its address, usually because the port is taken."""


class TransportError(AveragingError):
    """A call to another peer failed.

    Attributes:
        endpoint: the peer that was called; empty at that peer itself.
        definite: whether the configurations of the two peers exclude each other, so that a retry would fail too.
    """

    def __init__(self, endpoint: str, reason: str, *, definite: bool = False) -> None:
        super().__init__(f"{endpoint}: {reason}" if endpoint else reason, reason)
        self.endpoint = endpoint
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


class RefusalCause(Enum):
    """Why a peer refused a call, as far as its caller acts on it."""

    OTHER = ""
    NOT_SERVED = "does not serve this"
    """It does not serve the method: it has other software, another release, or has it switched off."""
    UNAUTHENTICATED = "requires another token"
    """Its run requires a token, and the caller has none, or one of another run. The reason says which."""
    WRONG_RUN = "belongs to another run"
    """It belongs to another run."""
    SAME_NAME = "it has the name of the peer that asks"
    """It is the caller itself, at another address, or a peer with the same name. The wire has this text, which must not
    change."""


class CallRefusedError(TransportError):
    """The peer refused this call.

    Attributes:
        cause: the cause, as far as its caller acts on it. `UNAUTHENTICATED` and `WRONG_RUN` are `definite`.
    """

    def __init__(
        self, endpoint: str, reason: str, cause: RefusalCause = RefusalCause.OTHER, *, definite: bool = False
    ) -> None:
        configured = cause in (RefusalCause.UNAUTHENTICATED, RefusalCause.WRONG_RUN)
        super().__init__(endpoint, reason, definite=definite or configured)
        self.cause = cause


def refusal_cause(error: BaseException) -> RefusalCause | None:
    """The cause if `error` is a refusal, else None."""
    return error.cause if isinstance(error, CallRefusedError) else None


class BusyError(AveragingError):
    """This peer serves the maximum number of calls. The caller should call another peer, or retry later."""


class ViolationKind(Enum):
    """How a peer broke the protocol, as far as code acts on it."""

    OTHER = auto()
    UNPROVEN = auto()
    """Either a member or the peer that relayed its message broke it; it is not known which."""
    NON_FINITE = auto()
    """It sent NaN or infinity where they are refused."""
    FOREIGN_ENDPOINT = auto()
    """It uses an endpoint that its certificate does not cover."""


class ProtocolViolationError(AveragingError):
    """A peer broke the protocol.

    Attributes:
        endpoint: the peer, with which the message begins; empty if the message does not name it.
        kind: the kind of violation, as far as code acts on it.
    """

    def __init__(self, reason: str = "", endpoint: str = "", *, kind: ViolationKind = ViolationKind.OTHER) -> None:
        super().__init__(f"{endpoint} {reason}" if endpoint else reason, reason)
        self.endpoint = endpoint
        self.kind = kind


class RoundError(AveragingError):
    """A round cannot produce an average, for example because the weights of its members sum to zero."""


class SiteError(AveragingError):
    """The ranks of a site can no longer go the same way: one is lost, was interrupted, or has failed half-way.

    Every process of the site has to end. torchrun starts the site again, which then takes over the run's state.
    """


class DiscoveryError(AveragingError):
    """Discovery refused a record: it is too large, it has expired, or there are too many."""


class JoinError(AveragingError):
    """None of the peers to join let this peer in.

    Args:
        seconds: time limit in which none answered; None if all refused.
        hint: a further sentence about the cause.
        text: the message, where peers do not join through others.

    Attributes:
        reasons: the reason for each of them.
        refused: whether all belong to another run, require another token, or have certificates of another authority. A
            retry fails as well until one side is configured differently.
    """

    def __init__(self, reasons: Mapping[str, str], seconds: float | None, hint: str = "", text: str = "") -> None:
        listed = "; ".join(f"{seed}: {reason}" for seed, reason in reasons.items())
        if text:
            pass
        elif seconds is None:
            text = (
                f"this peer and those to join cannot be in one run as they are configured ({listed}). "
                "Change what the reasons name and start this peer again."
            )
        else:
            text = (
                f"none of the {len(reasons)} peers to join answered within {seconds:g} s ({listed}). Check the "
                "addresses and that a peer of this run is up; a peer that joins none starts a run of its own."
            )
        super().__init__(f"{text} {hint}" if hint else text)
        self.reasons = dict(reasons)
        self.refused = seconds is None


class StateError(AveragingError):
    """No donor, trainer or group of trainers and explorers delivered a valid state. Nothing was changed locally.

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
    """A feed cannot continue: the server refuses a request or gives no usable answer, or a rank has died.

    Attributes:
        status: the HTTP status, for example 422; 0 if no answer came.
        retry_after: seconds after which the same request can succeed; None if it would be refused again.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class EngineError(AveragingError):
    """An engine does not answer a request for text.

    Attributes:
        status: the HTTP status, for example 400.
        parameter: the field of the request that is wrong; None if none is.
        code: what programs look at, for example "model_not_found"; None if there is no word for it.
        retry_after: seconds after which the same request can succeed; None if it would be refused again.
    """

    def __init__(
        self,
        message: str,
        status: int = 500,
        parameter: str | None = None,
        *,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.retry_after = retry_after


class RolloutError(AveragingError):
    """A rollout of an environment failed, or is no sample that can be trained.

    Attributes:
        reason: a word for it, by which such rollouts are counted, for example "engine" or "truncated".
        status: the HTTP status if an engine refused a request; 0 if it is not about one.
    """

    def __init__(self, reason: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


class WorkerError(AveragingError):
    """A model worker could not carry out a request, refuses the master, or is lost.

    Attributes:
        worker: the name of the worker.
        request: the kind of the request, for example `train_step`; empty if it is not about one request.
        lost: whether the worker has died, cannot be reached, or has restarted and lost what it held.
    """

    def __init__(self, worker: str, message: str, request: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.worker = worker
        self.request = request
        self.lost = lost


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
