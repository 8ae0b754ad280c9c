"""Topics: which tensors a round averages under which name, and how the result is written; and a round's options."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, TypedDict, Unpack

import torch

from averaging.allreduce import Averaged, Part, ReplyResidual, RoundResult, Slice, changes
from averaging.common import one_of
from averaging.config import PeerConfig
from averaging.errors import ConfigError
from averaging.matchmaking import Quorum
from averaging.protocol import MEAN, CompressionType, Group, Mode, ReplyForm, TopK, parse_aggregation, parse_compression
from averaging.receipts import DriftCheck
from averaging.tensors import (
    BlockLayout,
    Schema,
    SharedTensors,
    SparsePart,
    SparseTensor,
    VisibleTensor,
    Write,
    decode,
    describe,
    encode,
)

# Error feedback: the error of a lossy codec in one round is added to what is sent in the next one.
#
# Seide et al., 2014 (1-bit SGD); Karimireddy et al., 2019, arXiv:1901.09847.


LEAST_SHARE = 1 / 256
"""With a smaller share of the mean, a contribution would have to hold more than 256 times what the mean lacks."""


class ErrorFeedback:
    """The residuals of one peer's tensors: all decoded averages plus the residuals of all peers are the exact averages.

    A residual is what an average lacks since the code has lost it, of this peer's contributions and of the averages
    that it has encoded as a reducer. It takes as much memory as the tensors, and twice as much during a round. For
    float16 and bfloat16 it is float32, since it is usually too small to be added in the tensor's dtype. All are 1-D, on
    the CPU. `replies` is what the replies have lost, while this peer contributes nothing that counts.
    """

    def __init__(self, schema: Schema) -> None:
        self.residuals = [
            torch.zeros(spec.numel, dtype=torch.promote_types(spec.torch_dtype, torch.float32), device="cpu")
            for spec in schema.tensors
        ]
        self.replies = ReplyResidual()
        self._exact: list[torch.Tensor] = []  # inputs of the round in progress, before rounding
        self._share = 1.0  # in that round
        self._codes = [spec.compression for spec in schema.tensors]

    def inputs(self, tensors: Sequence[torch.Tensor], share: float = 1.0) -> list[torch.Tensor]:
        """The 1-D CPU `tensors` plus the residuals, in the dtypes of `tensors`: what is sent.

        `share` is this peer's share of the average.
        """
        self._share, times = share, 1 / share if share >= LEAST_SHARE else 0.0
        pairs = zip(tensors, self.residuals, strict=True)
        self._exact = [torch.add(tensor, residual, alpha=times) for tensor, residual in pairs]
        return [exact.to(tensor.dtype) for exact, tensor in zip(self._exact, tensors, strict=True)]

    def sent(self, inputs: Sequence[torch.Tensor], encoded: Iterable[Part], plain: Iterable[Part]) -> None:
        """Updates the residuals after a round, given what `inputs` returned last.

        `encoded` are parts that another member has reduced, so that they went through the codec; `plain` those that
        this member has reduced itself. The residuals of all others, which were not averaged, do not change.
        """
        if self._share < LEAST_SHARE:
            self.replies.applied()
            return
        for number, start, stop in _slices(encoded):
            values = inputs[number][start:stop]
            self._set_residual(number, start, stop, decode(encode(values, self._codes[number])))
        for number, start, stop in _slices(plain):
            self._set_residual(number, start, stop, inputs[number][start:stop])
        for number, _, elements, loss in self.replies.take():
            self.residuals[number][elements] += loss
        self._exact = []

    def _set_residual(self, number: int, start: int, stop: int, sent: torch.Tensor) -> None:
        exact, residual = self._exact[number][start:stop], self.residuals[number][start:stop]
        torch.sub(exact, sent.to(exact.dtype), out=residual).mul_(self._share)


def _slices(parts: Iterable[Part]) -> Iterator[Slice]:
    return (piece for part in parts for piece in part.slices)


# With `top_k` and `visible` most of a change is not sent, so their error feedback is no correction but where most of it
# waits.


AT_ONCE = 1 << 20
"""Elements of a contribution that are decoded at a time."""


@dataclass(frozen=True, slots=True)
class SparseInputs:
    """What a peer sends in one round with `top_k` or `visible`; by number of the tensor, flat, in tile order."""

    base: Mapping[int, torch.Tensor]  # the residuals before the round
    exact: Mapping[int, torch.Tensor]  # `decay * residual + change`
    sparse: Mapping[int, SparseTensor | VisibleTensor]  # what is sent of it
    change: float  # norm of the change


class SparseFeedback:
    """The residuals of one peer with `top_k` or `visible`: what it has not sent yet of the changes in its tensors.

    When the result of a round is applied, `residual = decay * residual + change - sent`, where `sent` is what the other
    members decode. So all that was sent plus the residual equals the sum of all changes, each times `decay` to the
    number of rounds since. A round that fails, or whose result is not applied, changes nothing.

    Residuals are this peer's own: no newcomer downloads them. They take 4 bytes per element from the first round on,
    and twice as much from the start of a round until its result is applied.

    The peer's thread calls `inputs`, the training thread everything else, also during a round: whoever replaces the
    residuals meanwhile makes the contribution of that round void.

    Args:
        schema: schema of the tensors; those of which it sends all elements have no residual.
        top_k: see `TopK`; None with `visible`.
        decay: factor of the residuals in each round.
        weights: with `visible`, the weights by name from which the changes will be subtracted; not copied. If they
            are replaced during a round, that changes what is chosen, but what was not sent stays in the residual.

    Attributes:
        layouts: order of the elements of each tensor that has a residual, by the number of the tensor.
        residuals: flat float32 tensors in that order; none before the first round, when all are 0.
        replies: the residual of this peer as a reducer, which is another one.
    """

    def __init__(
        self, schema: Schema, top_k: TopK | None, decay: float, weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.top_k, self.decay, self.weights = top_k, decay, weights or {}
        self._names = [spec.name for spec in schema.tensors]
        self.layouts = {
            number: BlockLayout(spec.shape) for number, spec in enumerate(schema.tensors) if spec.compression.is_sparse
        }
        self.residuals: Mapping[int, torch.Tensor] = {}
        self.replies = ReplyResidual()
        self._last: SparseInputs | None = None  # of the last round, until it is applied or void
        self._sent: Mapping[int, SparseTensor | VisibleTensor] = {}  # in the last round that was applied
        self._change = 0.0

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | SparseTensor | VisibleTensor]:
        """What is sent of `decay * residual + change`, and the dense tensors; `tensors` are not kept."""
        base, self._last = self.residuals, None
        exact: dict[int, torch.Tensor] = {}
        sparse: dict[int, SparseTensor | VisibleTensor] = {}
        squares = 0.0
        for number, layout in self.layouts.items():
            exact[number] = change = layout.to_blocks(tensors[number].view(layout.shape))
            squares += float(torch.linalg.vector_norm(change)) ** 2
            if (residual := base.get(number)) is not None:
                change.add_(residual, alpha=self.decay)
            if self.top_k is not None:
                sparse[number] = SparseTensor.of(change, layout, self.top_k)
            else:
                weights = layout.to_blocks(self.weights[self._names[number]])
                sparse[number] = VisibleTensor.of(change, layout, weights)
        self._last = SparseInputs(base, exact, sparse, math.sqrt(squares))
        return [sparse.get(number, tensor) for number, tensor in enumerate(tensors)]

    def applied(self) -> None:
        """Takes what the last contribution has sent out of the residuals: its round's result is applied.

        It is also called if other peers may have applied that result: then it is better lost than applied twice.
        """
        last, self._last = self._last, None
        if last is None or last.base is not self.residuals:
            return
        for number, exact in last.exact.items():
            for start, stop in self.layouts[number].cuts(AT_ONCE):
                part = last.sparse[number].values(start, stop)
                exact[start:stop].index_add_(0, part.indices, part.values, alpha=-1)
        self.residuals, self._change, self._sent = last.exact, last.change, last.sparse
        self.replies.applied()

    def take_back(self) -> None:
        """Puts what was sent last back into the residuals, since the run goes on without the round that had it."""
        sent, self._sent = self._sent, {}
        for number, sparse in sent.items():
            if (residual := self.residuals.get(number)) is not None:
                residual.add_(sparse.dense())

    def open_change(self) -> dict[str, torch.Tensor]:
        """The change, by name, of a round whose result was not applied although others may have; empty without one."""
        if self._last is None or self._last.base is not self.residuals:
            return {}
        changes = {}
        for number, exact in self._last.exact.items():
            residual = self.residuals.get(number)
            change = exact if residual is None else torch.sub(exact, residual, alpha=self.decay)
            changes[self._names[number]] = self.layouts[number].from_blocks(change)
        return changes

    def applied_alone(self) -> None:
        """The residuals decay as in a round, since this peer has applied its change as it is, without one."""
        self._last = None
        for residual in self.residuals.values():
            residual.mul_(self.decay)

    def keep(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Adds changes, by name, that will be in no round any more."""
        numbers = {number: self._names[number] for number in self.layouts if self._names[number] in changes}
        added = {number: self.layouts[number].to_blocks(changes[name]) for number, name in numbers.items()}
        for number, residual in self.residuals.items():
            added[number] = added[number].add_(residual) if number in added else residual
        self.residuals, self._last = added, None

    def reset(self) -> None:
        self.residuals, self.replies, self._last, self._sent = {}, ReplyResidual(), None, {}

    def unsent(self) -> tuple[float, float]:
        """The norm of the residuals, and that of the change in the last round that was applied."""
        squares = sum(float(torch.linalg.vector_norm(residual)) ** 2 for residual in self.residuals.values())
        return math.sqrt(squares), self._change

    def state(self) -> dict[str, torch.Tensor]:
        return {
            self._names[number]: self.layouts[number].from_blocks(residual)
            for number, residual in self.residuals.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state` returned, whatever `top_k` and `decay` were then; others begin at 0."""
        self.residuals = {
            number: layout.to_blocks(tensors[self._names[number]])
            for number, layout in self.layouts.items()
            if self._names[number] in tensors
        }
        self.replies, self._last, self._sent = ReplyResidual(), None, {}

    def dense(self, number: int, parts: Iterable[tuple[Part, Averaged]]) -> torch.Tensor:
        layout = self.layouts[number]
        flat = torch.zeros(layout.numel, device="cpu")
        for part, values in parts:
            ((_, start, stop),) = part.slices
            flat[start:stop] = values.dense() if isinstance(values, SparsePart) else values
        return layout.from_blocks(flat).reshape(-1)


class Adopt(Enum):
    """How the result of a round is written to the tensors of a topic."""

    AVERAGE = "average"
    """The tensors hold the average; parts whose reducer was dropped keep their values."""
    WHOLE = "whole"
    """The tensors hold the average, equal at all members. If a part is missing, or all other
    members were lost, nothing is written and the round fails."""
    CHANGE = "change"
    """The tensors hold the average minus their former values; 0 in parts whose reducer was dropped."""


class TopicOptions(TypedDict, total=False):
    """Options of a topic besides its name and tensors.

    Attributes:
        adopt: how the result is written; `Adopt.AVERAGE` if not given.
        commits: whether a result is a new version of the downloadable state. If not given, it is in a strategy whose
            topic has parameters of the model, and otherwise not.
        compression: codec on the wire; the peer's if None. With `TOP_K` and `VISIBLE` the tensors must be changes,
            `adopt` must be `WHOLE`, and whoever applies a result calls `topic.feedback.applied()`, see
            `SparseFeedback`.
        top_k: options of `TOP_K`; the default ones if None.
        decay: factor of the residuals in each round with `TOP_K`, 0.95 if not given; with `VISIBLE` it is 1.
        weights: with `VISIBLE`, the weights that the tensors of these names change; see `SparseFeedback`.
        error_feedback: whether the error of a lossy codec is added to what is sent in the next round; `TOP_K` and
            `VISIBLE` have their own.
    """

    adopt: Adopt | str
    commits: bool
    compression: CompressionType | str | None
    top_k: TopK | None
    decay: float
    weights: Mapping[str, torch.Tensor]
    error_feedback: bool


@dataclass(frozen=True, slots=True)
class Topic:
    """Tensors that are averaged together."""

    tensors: SharedTensors  # under the peer's lock
    schema: Schema  # with the topic's name, which is empty for the peer's own tensors
    adopt: Adopt  # how the result is written
    commits: bool  # whether the result is a new version of the downloadable state
    feedback: ErrorFeedback | SparseFeedback | None  # None without error feedback, and with deltas

    def sending_exactly(self, names: Collection[str]) -> Topic:
        """A copy that does not compress the tensors of these names; for topics that were not averaged yet."""
        specs = (
            replace(spec, compression=CompressionType.NONE) if spec.name in names else spec
            for spec in self.schema.tensors
        )
        schema = replace(self.schema, tensors=tuple(specs))
        match self.feedback:
            case SparseFeedback(top_k=top_k, decay=decay, weights=weights):
                return replace(self, schema=schema, feedback=SparseFeedback(schema, top_k, decay, weights))
            case ErrorFeedback():
                return replace(self, schema=schema, feedback=ErrorFeedback(schema))
        return replace(self, schema=schema)

    def at(self, phase: str) -> Schema:
        """The schema of one phase; only peers in the same phase form a group."""
        return replace(self.schema, topic=f"{self.schema.topic}/{phase}") if phase else self.schema

    def write(self, result: RoundResult) -> None:
        """Writes a result. The caller holds the lock."""
        if not isinstance(self.feedback, SparseFeedback):
            self.tensors.write(changes(result), self._how)
            return
        # One tensor after the other, since each needs a dense copy in another order of its elements.
        for number, parts in groupby(
            sorted(result.parts, key=lambda part: part[0].slices), lambda part: part[0].tensor
        ):
            if number in self.feedback.layouts:
                self.tensors.write([(number, 0, self.feedback.dense(number, parts))], self._how)
            else:
                self.tensors.write(changes(replace(result, parts=list(parts))), self._how)

    @property
    def _how(self) -> Write:
        if self.adopt is Adopt.CHANGE:
            return Write.ONLY if self.schema.reply is ReplyForm.DELTA else Write.DIFFERENCE
        return Write.ADD if self.schema.reply is ReplyForm.DELTA else Write.REPLACE


def make_topic(config: PeerConfig, tensors: SharedTensors, name: str = "", **options: Unpack[TopicOptions]) -> Topic:
    adopt = options.get("adopt", Adopt.AVERAGE)
    compression, top_k = options.get("compression"), options.get("top_k")
    error_feedback = options.get("error_feedback", False)
    adopt = one_of(Adopt, adopt, "adopt")
    code = config.compression if compression is None else parse_compression(compression)
    top_k = top_k or TopK() if code is CompressionType.TOP_K else None
    decay = options.get("decay", 0.95) if top_k is not None else 1.0
    weights = options.get("weights", {})
    if code.is_sparse and adopt is not Adopt.WHOLE:
        name = code.name.lower()
        raise ConfigError(f"compression={name!r} needs adopt='whole': what is sent is taken out of the residuals")
    if code is CompressionType.VISIBLE and not weights:
        raise ConfigError("compression='visible' needs the weights that the tensors change, by name, as `weights`")
    # With deltas the results of the members differ slightly. Sparse codes refuse them by name instead.
    reply = ReplyForm.AVERAGE if adopt is Adopt.WHOLE and not code.is_sparse else config.reply_form
    schema = describe(
        tensors.names,
        tensors.tensors,
        compression=code,
        part_size_bytes=config.part_size_bytes,
        reply=reply,
        topic=name,
        aggregation=parse_aggregation(config.aggregation),
        sparse=top_k,
    )
    feedback: ErrorFeedback | SparseFeedback | None = None
    if code.is_sparse:
        feedback = SparseFeedback(schema, top_k, decay, weights)
    elif (error_feedback or config.mode is Mode.AUXILIARY) and reply is ReplyForm.AVERAGE:
        # With deltas the error stays in the tensors themselves, since a delta is relative to what was sent. An
        # auxiliary cannot know whether the others have error feedback, which needs that of its replies.
        if error_feedback and schema.aggregation != MEAN:
            raise ConfigError(
                f"error_feedback does not work with aggregation={config.aggregation!r}, which leaves out or limits "
                "what a single peer still has to send; use aggregation='mean', or leave error_feedback out"
            )
        feedback = ErrorFeedback(schema)
    return Topic(tensors, schema, adopt, options.get("commits", False), feedback)


# The options of a round.


StopSearch = Callable[[Mapping[str, bytes]], bool]
"""Whether the search for a group ends, given the others' packed progress by endpoint."""

StartSize = Callable[[Mapping[str, bytes]], int]
"""Number of contributing members with which a group begins, given the same."""

ExpectedPeers = Callable[[Mapping[str, bytes]], Collection[str]]
"""Endpoints of the peers for which a round waits, given the same."""


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
        prepare: function that is called in another thread once the group is known, before the tensors are read, with
            what each member gathers, by endpoint in the group's order. It may write to the topic's tensors, for example
            at a place that depends on the group. If it raises a RoundError, the round fails at this peer.
        quorum: when a group that this peer leads begins although expected peers are missing; by default once its
            declaration expires. Of a phase with `once` no second group begins while the first one averages.
        follows: whether this peer only joins groups that others lead, without being waited for.
        confirm: function that is awaited with the group once the result is there. It returns why the result is not
            adopted, and the round has failed then; or nothing. It is not for strategies.
    """

    weight: float
    gather: Any
    phase: str
    start_size: int | StartSize
    expected_peers: ExpectedPeers
    search_timeout: float | Callable[[Mapping[str, bytes]], float]
    stop_search: StopSearch
    drift: DriftCheck
    prepare: Callable[[Mapping[str, Any]], None]
    quorum: Quorum
    follows: bool
    confirm: Callable[[Group], Awaitable[str]]


class ExpectedAtFirst:
    """The peers that a round expects as its search begins, and which of them are expected later on."""

    def __init__(self, peers: ExpectedPeers) -> None:
        self.peers = peers
        self._first: frozenset[str] | None = None

    def start_size(self, announcements: Mapping[str, bytes]) -> int:
        present = frozenset(self.peers(announcements))
        if self._first is None:
            self._first = present
        return 1 + len(self._first & present)

    def have_left(self, announcements: Mapping[str, bytes]) -> bool:
        """Whether there were some, and nobody is expected any more."""
        self.start_size(announcements)
        return bool(self._first) and not self.peers(announcements)
