"""What a round averages: the peer's own tensors, or others under a name of their own, and how the result is written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypedDict

import torch

from averaging.allreduce import RoundResult, changes
from averaging.allreduce.partition import Part
from averaging.common.shared_tensors import SharedTensors, Write
from averaging.common.validation import one_of
from averaging.config import PeerConfig
from averaging.peer.error_feedback import ErrorFeedback
from averaging.protocol.aggregation import parse_aggregation
from averaging.protocol.messages import CompressionType, parse_compression
from averaging.protocol.schema import ReplyForm, Schema, describe


class Adopt(Enum):
    """What becomes of the tensors of a topic when a round's result is in."""

    AVERAGE = "average"
    """They hold the average; parts whose reducer was lost keep their values."""
    WHOLE = "whole"
    """They hold the average of all parts, the same at all members whatever the peer's reply form; if a single one is
    missing nothing is written, and the round has failed."""
    CHANGE = "change"
    """They hold the average minus what they held: 0 in parts whose reducer was lost."""


class TopicOptions(TypedDict, total=False):
    """What may be said of a topic besides its name and its tensors.

    Attributes:
        adopt: what becomes of the tensors when a result is in; they hold the average if not given.
        commits: whether a result is a new version of the downloadable state; not if not given.
        compression: how they are packed on the wire; as the peer's own if None.
        error_feedback: whether what a lossy code loses is added to what is sent in the next round.
        in_place: whether averages are written as they arrive, see `PeerConfig`; as the peer's own if None.
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
        tensors: under the peer's lock.
        schema: of the tensors; its `topic` names them, empty for the peer's own.
        adopt: what becomes of them.
        commits: whether the result is a new version of the state that others download.
        feedback: what lossy codes lost so far; None if that is not kept, or stays in the tensors as with deltas.
        in_place: whether averages may be written as they arrive, see `PeerConfig`.
    """

    tensors: SharedTensors
    schema: Schema
    adopt: Adopt
    commits: bool
    feedback: ErrorFeedback | None
    in_place: bool

    def sending_exactly(self, names: Collection[str]) -> Topic:
        """The same topic where the tensors of these names are not compressed. Nothing has been sent in it yet."""
        specs = (
            replace(spec, compression=CompressionType.NONE) if spec.name in names else spec
            for spec in self.schema.tensors
        )
        schema = replace(self.schema, tensors=tuple(specs))
        return replace(self, schema=schema, feedback=None if self.feedback is None else ErrorFeedback(schema))

    def at(self, phase: str) -> Schema:
        """The schema of one phase: peers in different phases do not meet."""
        return replace(self.schema, topic=f"{self.schema.topic}/{phase}") if phase else self.schema

    def write(self, result: RoundResult) -> None:
        """Writes the result. The caller holds the lock."""
        self.tensors.write(changes(result), self._how)

    def write_now(self, part: Part, values: torch.Tensor, provided: Callable[[], bool]) -> bool:
        """Writes one part of a result if that can be done before the rest is known, and at once; whether it was.

        Args:
            part: of the topic's tensors.
            values: its average, or its delta.
            provided: asked under the lock whether it may be.
        """
        return self.tensors.write_now(part.tensor, part.start, values, self._how, provided)

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
    """The topic of these tensors at a peer with this configuration; see `Peer.topic` and `TopicOptions`.

    Raises:
        ConfigError: there is no such `adopt` or `compression`.
        TensorError: a tensor that cannot be averaged.
    """
    how = one_of(Adopt, adopt, "adopt")
    # Deltas leave each member a little apart from the others.
    reply = ReplyForm.AVERAGE if how is Adopt.WHOLE else config.reply
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
        how,
        commits,
        # A delta is relative to what was sent, so what a code has lost stays in the tensors themselves.
        ErrorFeedback(schema) if error_feedback and reply is ReplyForm.AVERAGE else None,
        config.in_place if in_place is None else in_place,
    )
