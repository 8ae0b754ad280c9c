"""Topics: which tensors a round averages under which name, and how the result is written; and a round's options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypedDict

import torch

from averaging.allreduce import Part, RoundResult, changes
from averaging.common import one_of
from averaging.config import PeerConfig
from averaging.protocol import CompressionType, Group, ReplyForm, parse_aggregation, parse_compression
from averaging.receipts import DriftCheck
from averaging.tensors import Schema, SharedTensors, Write, decode, describe, encode

# Error feedback: the error of a lossy codec in one round is added to what is sent in the next one.
#
# Seide et al., 2014 (1-bit SGD); Karimireddy et al., 2019, arXiv:1901.09847.


class ErrorFeedback:
    """The residuals of one peer's tensors: all that was sent plus the residuals equals the sum of all inputs.

    It takes as much memory as the tensors, and twice as much during a round. For float16 and bfloat16 it uses float32,
    since a residual is usually too small to be added in the tensor's dtype. It does not include the error of a reducer
    that encodes an average, because that is the same at all members.

    Args:
        schema: schema of the tensors.

    Attributes:
        residuals: one per tensor, 1-D, on the CPU, float32 or float64.
    """

    def __init__(self, schema: Schema) -> None:
        self.residuals = [
            torch.zeros(spec.numel, dtype=torch.promote_types(spec.torch_dtype, torch.float32), device="cpu")
            for spec in schema.tensors
        ]
        self._exact: list[torch.Tensor] = []  # inputs of the round in progress, before rounding
        self._codes = [spec.compression for spec in schema.tensors]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to send: `tensors` plus the residuals, 1-D, in the dtypes of `tensors`."""
        self._exact = [tensor + residual for tensor, residual in zip(tensors, self.residuals, strict=True)]
        return [exact.to(tensor.dtype) for exact, tensor in zip(self._exact, tensors, strict=True)]

    def sent(self, inputs: Sequence[torch.Tensor], encoded: Iterable[Part], plain: Iterable[Part]) -> None:
        """Updates the residuals after a round. Parts in neither list were not averaged; their residuals do not change.

        Args:
            inputs: what `inputs` returned last.
            encoded: parts that another member has reduced, so that they went through the codec.
            plain: parts that this member has reduced itself, without the codec.
        """
        for part in encoded:
            values = inputs[part.tensor][part.start : part.stop]
            self._set_residual(part, decode(encode(values, self._codes[part.tensor])))
        for part in plain:
            self._set_residual(part, inputs[part.tensor][part.start : part.stop])
        self._exact = []

    def _set_residual(self, part: Part, sent: torch.Tensor) -> None:
        exact = self._exact[part.tensor][part.start : part.stop]
        torch.sub(exact, sent.to(exact.dtype), out=self.residuals[part.tensor][part.start : part.stop])


class Adopt(Enum):
    """How the result of a round is written to the tensors of a topic."""

    AVERAGE = "average"
    """The tensors hold the average; parts whose reducer was dropped keep their values."""
    WHOLE = "whole"
    """The tensors hold the average, equal at all members for every `reply_form`. If a part is missing, nothing is
    written and the round fails."""
    CHANGE = "change"
    """The tensors hold the average minus their former values; 0 in parts whose reducer was dropped."""


class TopicOptions(TypedDict, total=False):
    """Options of a topic besides its name and tensors.

    Attributes:
        adopt: how the result is written; `Adopt.AVERAGE` if not given.
        commits: whether a result is a new version of the downloadable state; False if not given.
        compression: codec on the wire; the peer's if None.
        error_feedback: whether the error of a lossy codec is added to what is sent in the next round.
        in_place: whether averages are written as they arrive, see `PeerConfig`; the peer's setting if None.
    """

    adopt: Adopt | str
    commits: bool
    compression: CompressionType | str | None
    error_feedback: bool
    in_place: bool | None


@dataclass(frozen=True, slots=True)
class Topic:
    """Tensors that are averaged together.

    Attributes:
        tensors: tensors under the peer's lock.
        schema: schema of the tensors, with the topic's name; empty for the peer's own tensors.
        adopt: how the result is written.
        commits: whether the result is a new version of the downloadable state.
        feedback: errors of a lossy codec so far; None without error feedback, and with deltas.
        in_place: whether averages may be written as they arrive, see `PeerConfig`.
    """

    tensors: SharedTensors
    schema: Schema
    adopt: Adopt
    commits: bool
    feedback: ErrorFeedback | None
    in_place: bool

    def sending_exactly(self, names: Collection[str]) -> Topic:
        """A copy that does not compress the tensors of these names; for topics that were not averaged yet."""
        specs = (
            replace(spec, compression=CompressionType.NONE) if spec.name in names else spec
            for spec in self.schema.tensors
        )
        schema = replace(self.schema, tensors=tuple(specs))
        return replace(self, schema=schema, feedback=None if self.feedback is None else ErrorFeedback(schema))

    def at(self, phase: str) -> Schema:
        """The schema of one phase; only peers in the same phase form a group."""
        return replace(self.schema, topic=f"{self.schema.topic}/{phase}") if phase else self.schema

    def write(self, result: RoundResult) -> None:
        """Writes a result. The caller holds the lock."""
        self.tensors.write(changes(result), self._how)

    def write_now(self, part: Part, values: torch.Tensor, allowed: Callable[[], bool]) -> bool:
        """Writes one part of an incomplete result, if that needs no waiting. Returns whether it did.

        Args:
            part: a part of the topic's tensors.
            values: its average or its delta.
            allowed: function that is called under the lock; the part is written only if it returns True.
        """
        return self.tensors.write_now(part.tensor, part.start, values, self._how, allowed)

    @property
    def writes_early(self) -> bool:
        """Whether `write_now` may be called."""
        return self.in_place and self.adopt is Adopt.AVERAGE and self.feedback is None

    @property
    def _how(self) -> Write:
        if self.adopt is Adopt.CHANGE:
            return Write.ONLY if self.schema.reply is ReplyForm.DELTA else Write.DIFFERENCE
        return Write.ADD if self.schema.reply is ReplyForm.DELTA else Write.REPLACE


def make_topic(
    config: PeerConfig,
    tensors: SharedTensors,
    name: str = "",
    *,
    adopt: Adopt | str = Adopt.AVERAGE,
    commits: bool = False,
    compression: CompressionType | str | None = None,
    error_feedback: bool = False,
    in_place: bool | None = None,
) -> Topic:
    """Creates a topic of these tensors at a peer with this configuration; see `Peer.topic` and `TopicOptions`.

    Raises:
        ConfigError: `adopt` or `compression` is invalid.
        TensorError: a tensor cannot be averaged.
    """
    adopt = one_of(Adopt, adopt, "adopt")
    # With deltas the results of the members differ slightly.
    reply = ReplyForm.AVERAGE if adopt is Adopt.WHOLE else config.reply_form
    schema = describe(
        tensors.names,
        tensors.tensors,
        compression=config.compression if compression is None else parse_compression(compression),
        part_size_bytes=config.part_size_bytes,
        reply=reply,
        topic=name,
        aggregation=parse_aggregation(config.aggregation),
    )
    return Topic(
        tensors,
        schema,
        adopt,
        commits,
        # With deltas the error stays in the tensors themselves, since a delta is relative to what was sent.
        ErrorFeedback(schema) if error_feedback and reply is ReplyForm.AVERAGE else None,
        config.in_place if in_place is None else in_place,
    )


# The options of a round.


StopSearch = Callable[[Mapping[str, bytes]], bool]
"""Whether the search for a group ends, given the others' packed progress by endpoint."""

StartSize = Callable[[Mapping[str, bytes]], int]
"""Number of contributing members with which a group begins, given the same."""

ExpectedPeers = Callable[[Mapping[str, bytes]], Collection[str]]
"""Endpoints of the peers for which a round waits, given the same."""

SearchTimeout = Callable[[Mapping[str, bytes]], float]
"""Seconds to look for a group, given the same as the search begins."""

Confirm = Callable[[Group], Awaitable[str]]
"""Says why the result of a round with this group is not adopted; an empty text if it is."""


class RoundOptions(TypedDict, total=False):
    """Options of one round: the keyword arguments of `Peer.average`.

    Attributes:
        weight: weight of this peer's tensors in the average, finite and at least 0; 1 by default, in a strategy that of
            the averager.
        gather: value that all members of the group get: numbers, strings, bytes, lists, or dicts whose keys are
            strings, bytes or integers; at most 64 KiB packed.
        phase: phase of the topic, such as a step number; only peers in the same phase form a group.
        start_size: number of contributing members with which a group that this peer leads begins at once. A function
            is called with the others' progress by endpoint whenever that changes. By default it is `group_size`,
            counting all members; for an auxiliary it is also the number of peers that train; in a strategy it is the
            number of expected peers that have not left, and this one.
        expected_peers: function that returns the peers to wait for, given the others' progress by endpoint. A peer
            whose address refuses connections is removed from that progress, so that no peer waits for it. By default
            nobody is waited for; in a strategy all peers that train in the run are.
        search_timeout: seconds to look for a group, or a function that returns them, given the others' progress;
            `round_timeout` by default, in a strategy `group_wait` for each key to search.
        stop_search: function that is called whenever the others' progress changes; the search ends if it returns True.
            In a strategy it ends by default when all expected peers have left.
        drift: comparison of this peer with the other members, in a strategy from `StrategyContext.fingerprint`; its
            fingerprint is passed to all of them with `gather`.
        confirm: function that is awaited with the group once the result is there. It returns why the result is not
            adopted, and the round has failed then; or nothing. It does not work together with `in_place`, and is not
            for strategies.
    """

    weight: float
    gather: Any
    phase: str
    start_size: int | StartSize
    expected_peers: ExpectedPeers
    search_timeout: float | SearchTimeout
    stop_search: StopSearch
    drift: DriftCheck
    confirm: Confirm


class ExpectedAtFirst:
    """The peers that a round expects as its search begins, and which of them are expected later on.

    Args:
        peers: function of the others' progress, see `RoundOptions`.
    """

    def __init__(self, peers: ExpectedPeers) -> None:
        self.peers = peers
        self._first: frozenset[str] | None = None

    def start_size(self, announcements: Mapping[str, bytes]) -> int:
        """The number of those that are still expected, and this peer."""
        present = frozenset(self.peers(announcements))
        if self._first is None:
            self._first = present
        return 1 + len(self._first & present)

    def have_left(self, announcements: Mapping[str, bytes]) -> bool:
        """Whether there were some, and nobody is expected any more."""
        self.start_size(announcements)
        return bool(self._first) and not self.peers(announcements)
