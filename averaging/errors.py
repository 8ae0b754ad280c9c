"""Every error this library raises. Each says what happened, to whom, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_TEXT = 4000
"""Characters of a message. Longer messages are cut."""


class AveragingError(Exception):
    """The base of all errors of this library; the others are in `averaging.errors`.

    Other peers may have written parts of its message, which is therefore one printable line of limited length.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(AveragingError, ValueError):
    """An argument that cannot work: a malformed address, a negative weight, a run id with a dot."""


class TensorError(AveragingError, ValueError):
    """A tensor that cannot be averaged: an integer dtype, or NaN and infinity where they are refused."""


class SchemaMismatchError(AveragingError):
    """Another peer of the run averages other tensors, or the same ones in another way.

    Attributes:
        endpoint: the peer that differs.
        difference: the first difference, in words.
    """

    def __init__(self, endpoint: str, difference: str) -> None:
        super().__init__(f"{endpoint} averages something else: {difference}; give both the same tensors and options")
        self.endpoint = endpoint
        self.difference = difference


class PeersMissingError(AveragingError, TimeoutError):
    """Fewer peers than required train in the run within the time that was given.

    Attributes:
        peers: The endpoints that are known, of peers that train or not.
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
        definite: whether the two peers, as they are configured, can never talk to each other: to ask again is vain.
    """

    def __init__(self, endpoint: str, reason: str, *, definite: bool = False) -> None:
        super().__init__(_of(endpoint, reason))
        self.endpoint = endpoint
        self.reason = printable(reason)
        self.definite = definite


class PeerUnreachableError(TransportError):
    """Nobody answers there, or the connection broke.

    Attributes:
        refused: whether nothing listens there any more: the connection was refused.
    """

    def __init__(self, endpoint: str, reason: str, *, refused: bool = False, definite: bool = False) -> None:
        super().__init__(endpoint, reason, definite=definite)
        self.refused = refused


class CallRefusedError(TransportError):
    """The peer answered that it will not or cannot serve this call."""


class UnauthenticatedError(CallRefusedError):
    """The peer's run wants a token, and this peer has none, or one that is not the run's; the reason says which."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(endpoint, reason, definite=True)


class WrongRunError(CallRefusedError):
    """The peer belongs to another run."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(endpoint, reason, definite=True)


class BusyError(AveragingError):
    """This peer has as many calls in hand as it takes; the caller should turn to another peer, or come back later."""


class ProtocolViolationError(AveragingError):
    """A peer sent what the protocol does not allow. The fault is the sender's."""


class UnprovenViolationError(ProtocolViolationError):
    """The protocol was broken, but by whom cannot be known: by a member, or by who passed on its words."""


class LyingLeaderError(AveragingError):
    """A leader announced different groups to its members, so no result of the round can be right."""


class NonFiniteError(ProtocolViolationError):
    """A peer sent NaN or infinity where they are refused."""


class ForeignEndpointError(ProtocolViolationError):
    """A peer uses the endpoint of a host for which its certificate does not stand."""


class RoundError(AveragingError):
    """A round that cannot be done, for example because the weights of its members sum to zero."""


class DiscoveryError(AveragingError):
    """Discovery cannot do what was asked: a record that is too large or has expired, or one too many."""


class NoSeedAnsweredError(DiscoveryError):
    """None of the peers given to join answered in time.

    Args:
        hint: a further sentence about the cause.

    Attributes:
        reasons: for each seed, why.
    """

    def __init__(self, reasons: Mapping[str, str], seconds: float, hint: str = "") -> None:
        told = (
            f"none of the {len(reasons)} peers to join answered within {seconds:g} s ({_listed(reasons)}). "
            "Check the addresses and that a peer of this run is up; without --join this peer starts a run of its own."
        )
        super().__init__(f"{told} {hint}" if hint else told)
        self.reasons = dict(reasons)


class JoinRefusedError(NoSeedAnsweredError):
    """All peers given to join belong to another run, take no such token, or show no certificate that is believed.

    To try again gives the same result, until one side is configured otherwise.
    """

    def __init__(self, reasons: Mapping[str, str], hint: str = "") -> None:
        told = (
            f"this peer and those to join cannot be in one run as they are configured ({_listed(reasons)}). "
            "Change what is named and start this peer again."
        )
        DiscoveryError.__init__(self, f"{told} {hint}" if hint else told)
        self.reasons = dict(reasons)


class StateError(AveragingError):
    """A state could not be downloaded from anybody; nothing was changed locally.

    Attributes:
        gone: the donors among those asked at whose endpoint nothing listens any more.
    """

    def __init__(self, message: str, gone: Collection[str] = ()) -> None:
        super().__init__(message)
        self.gone = frozenset(gone)


class ClosedError(AveragingError):
    """The peer is not running: it was not entered with `async with`, or has been closed."""


class FeedError(AveragingError):
    """A feed cannot go on: a registration does not fit, the server has forgotten a batch, a rank has died."""


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
        retry_after: seconds to wait before the next try.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class FeedUnreachableError(FeedError):
    """The feed server gave no usable answer for as long as the caller is willing to wait."""


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(_of(seed, reason) for seed, reason in reasons.items())


def _of(endpoint: str, reason: str) -> str:
    """What became of a call, with the peer's endpoint once: its own words may begin with it."""
    return reason if reason.startswith((f"{endpoint} ", f"{endpoint}: ")) else f"{endpoint}: {reason}"


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Text that another peer may have written, made fit for logs and terminals.

    Args:
        text: as it came.
        most: characters of the result.

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
