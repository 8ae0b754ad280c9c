"""What a run will cost a peer in bytes, seconds and memory, before it is started. Pure.

The constants are measured: docs/how-to/plan.md says where, and how far an estimate was from the rounds on emulated
links. Read in this order: `PeerLink` and `RunPlan` (what is asked), `estimate` (the answer), `memory_of_peer`,
`compare`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from averaging.common import duration, size
from averaging.errors import ConfigError
from averaging.protocol import MAX_GROUP_SIZE, CompressionType, TopK
from averaging.receipts import Receipt
from averaging.tensors import AVERAGED_DTYPES, codec_of

DAY = 86_400.0

TCP_PAYLOAD = 0.955
"""Part of a link's nominal rate that is left for the data of TCP: frames, IP and TCP headers take the rest."""

LINK_USE = 0.9
"""Part of the rate of plain TCP that an all-reduce reaches."""

MOVING = 1.0
"""CPU seconds of a peer for each GiB that it sends or receives over a direct connection, sums included."""

SEALING = 1.64
"""Factor of `MOVING` where connections are encrypted."""

CHECKING, ADOPTING = 0.05, 0.11
"""Seconds for each GiB of tensors: to look for NaN and infinity, and to write the averages to them."""

JOINING, JOINING_TRIPS = 0.01, 3
"""Seconds, and round trips, until peers that arrive at the same moment are a group."""

CODEC_SECONDS: Mapping[CompressionType, tuple[float, float]] = {
    CompressionType.NONE: (0.0, 0.0),
    CompressionType.FLOAT16: (0.11, 0.075),
    CompressionType.BFLOAT16: (0.11, 0.075),
    CompressionType.MEANSTD_16BIT: (1.4, 0.2),
    CompressionType.BLOCKWISE_INT8: (0.42, 0.45),
    CompressionType.UNIFORM_8BIT: (2.1, 0.5),
    CompressionType.QUANTILE_8BIT: (7.5, 0.5),
}
"""CPU seconds to encode and to decode a GiB of float32 within a round."""

CHOOSING, CHOOSING_EACH = 0.75, 6.1
"""CPU seconds to encode a GiB of float32 with top_k before a round: this, and this times the root of the density."""

COMBINING, DECODING_UNION = 5.5, 0.25
"""CPU seconds to decode replies with top_k for a GiB of float32: times density and members where the contributions are
sent on as they came, else this."""

REDUCING = 6.0
"""CPU seconds to reduce with top_k, times the density, for a GiB of float32 of the whole model."""

WRITING_BLOCKS = 0.5
"""CPU seconds to write a GiB of float32 from blocks to its tensors."""

INDEX_BITS = 12
"""Bits of the place of a value that top_k sends."""

PARTS_UNDER_WAY = 16 << 20
"""Bytes of parts that a peer holds while a round is in progress."""

DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class StrategyKind(StrEnum):
    """What the tensors of a round are."""

    LOCAL_SGD = "local_sgd"
    """The parameters, in their own dtype."""
    DILOCO = "diloco"
    """Their change since the last global step, in float32 for half-precision parameters."""
    GRADIENT_AVERAGING = "gradient_averaging"
    """Their gradients, in float32 for half-precision parameters."""


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of `bf16`, `bfloat16` and so on.

    Raises:
        ConfigError: there is no such dtype, or it cannot be averaged.
    """
    known = DTYPE_NAMES.get(name.lower(), name.lower())
    if known not in AVERAGED_DTYPES:
        raise ConfigError(f"{name!r} is no dtype that can be averaged; use one of {', '.join(DTYPE_NAMES)}")
    return AVERAGED_DTYPES[known]


_LINK = re.compile(r"(?P<rate>\d+(?:\.\d+)?)(?P<unit>[kMG])bit(?:/s)?(?:/(?P<trip>\d+(?:\.\d+)?)ms)?")


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The link of each peer: its rate in bits/s in each direction, and the round trip to another peer in seconds."""

    rate: float
    round_trip: float = 0.02

    @classmethod
    def parse(cls, text: str) -> PeerLink:
        """Reads `300Mbit/40ms`, or `300Mbit` with a round trip of 20 ms.

        Raises:
            ConfigError: it is no link.
        """
        if (match := _LINK.fullmatch(text.replace(" ", ""))) is None or not float(match["rate"]):
            raise ConfigError(f"{text!r} is no link; write its rate and round trip as 300Mbit/40ms or 1Gbit/5ms")
        rate = float(match["rate"]) * {"k": 1e3, "M": 1e6, "G": 1e9}[match["unit"]]
        return cls(rate, float(match["trip"]) / 1000) if match["trip"] else cls(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run that is planned.

    Attributes:
        parameters: number of trained elements of the model.
        dtype: their dtype.
        strategy: what is averaged.
        sync_every: local steps between two rounds of the same tensors; with gradient averaging batches of one peer for
            a global step.
        compression: code on the wire; TOP_K for DiLoCo only.
        top_k: how much is sent with TOP_K.
        peers: peers of a group.
        link: link of each peer; of unequal ones the slowest, and of unequal directions the slower one.
        step_seconds: seconds of a local step of each peer, or of all of them alike.
        delay: local steps for which training goes on during a round; `sync_every` for `LocalSGD(overlap=True)`.
        fragments: pieces of the model, each with a round of its own (DiLoCo).
        error_feedback: whether what a lossy code drops is kept for the next round.
        statistics: values that the inner optimizer keeps for each parameter: 2 for Adam, 1 for momentum.
        statistics_averaged: whether these are averaged as well (`LocalSGD(statistics=True)`), never compressed.
        share_state: whether newcomers may download the state.
        encrypted: whether connections use TLS.
        cores: processor cores that a peer has for its rounds.

    Raises:
        ConfigError: a value is out of range.
    """

    parameters: int
    dtype: torch.dtype = torch.float32
    strategy: StrategyKind = StrategyKind.DILOCO
    sync_every: int = 100
    compression: CompressionType = CompressionType.NONE
    top_k: TopK = field(default_factory=TopK)
    peers: int = 8
    link: PeerLink = PeerLink(100e6)
    step_seconds: tuple[float, ...] = (1.0,)
    delay: int = 0
    fragments: int = 1
    error_feedback: bool = False
    statistics: int = 2
    statistics_averaged: bool = False
    share_state: bool = True
    encrypted: bool = False
    cores: float = 1.0

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= MAX_GROUP_SIZE:
            raise ConfigError(f"a group has 2 to {MAX_GROUP_SIZE} peers, not {self.peers}")
        if self.fragments > 1 and (self.strategy is not StrategyKind.DILOCO or self.sync_every % self.fragments):
            raise ConfigError("fragments are for diloco, and sync_every must be a multiple of their number")
        if self.delay and self.strategy is StrategyKind.GRADIENT_AVERAGING:
            raise ConfigError("gradient averaging waits for each round, so that delay must be 0")
        if self.delay > self.steps_of_round or (self.delay == self.steps_of_round and self.is_diloco):
            raise ConfigError(f"a round begins every {self.steps_of_round} steps; delay must be less, not {self.delay}")
        if self.is_sparse and not self.is_diloco:
            raise ConfigError("top_k sends changes of many steps, so that it is for diloco", "compression")
        if self.statistics_averaged and self.strategy is not StrategyKind.LOCAL_SGD:
            raise ConfigError("only local_sgd averages the statistics of the optimizer")
        if len(self.step_seconds) not in (1, self.peers):
            raise ConfigError(f"give the seconds of a step once, or for each of {self.peers} peers")

    @property
    def is_diloco(self) -> bool:
        """Whether a round has the change of many steps."""
        return self.strategy is StrategyKind.DILOCO

    @property
    def is_sparse(self) -> bool:
        """Whether only the largest changes are sent."""
        return self.compression is CompressionType.TOP_K

    @property
    def steps_of_round(self) -> int:
        """Local steps from one round to the next."""
        return self.sync_every // self.fragments

    @property
    def averaged_dtype(self) -> torch.dtype:
        """The dtype of what is averaged."""
        if self.strategy is StrategyKind.LOCAL_SGD or self.dtype.itemsize >= torch.float32.itemsize:
            return self.dtype
        return torch.float32

    @property
    def tensor_bytes(self) -> float:
        """Bytes of the tensors of one round in memory."""
        copies = 1 + self.statistics * self.statistics_averaged
        return self.parameters * copies * self.averaged_dtype.itemsize / self.fragments

    @property
    def contribution_bytes(self) -> float:
        """Bytes of what one peer contributes to a round, on the wire."""
        if self.is_sparse:
            return self._as_they_came / self.peers
        coded = self.parameters * codec_of(self.compression, self.averaged_dtype).bytes_per_element
        exact = self.parameters * self.statistics * self.statistics_averaged * self.averaged_dtype.itemsize
        return (coded + exact) / self.fragments

    @property
    def reply_bytes(self) -> float:
        """Bytes of the averages of all tensors of a round, on the wire."""
        return min(self._as_they_came, self._union) if self.is_sparse else self.contribution_bytes

    @property
    def sends_union(self) -> bool:
        """Whether the union of sparse contributions is shorter than the contributions as they came."""
        return self._union < self._as_they_came

    @property
    def _as_they_came(self) -> float:
        """Bytes of the sparse contributions of all peers."""
        bits = self.top_k.density * (INDEX_BITS + self.top_k.bits)
        return self.peers * self.parameters * bits / 8 / self.fragments

    @property
    def _union(self) -> float:
        """Bytes of the elements that any peer sends, in 8 bits: with indices, or one bit for each element.

        The changes of the peers are taken as independent. The more they are alike, the shorter it is.
        """
        share = 1 - (1 - self.top_k.density) ** self.peers
        return self.parameters * min(share * (1 + INDEX_BITS / 8), share + 1 / 8) / self.fragments


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one peer spends.

    Attributes:
        bytes_sent: bytes that it sends in a round, and that it receives.
        contributed: those of them for the shards of others; the rest are the averages of its own shard.
        coding: CPU seconds of the code in a round.
        phases: seconds of a round by phase, as in receipts; `looking` includes the wait for slower peers.
        waited: seconds of a round in which the fastest peer does not train.
        rounds_per_day: rounds in a day.
        memory: bytes by what they hold.
    """

    bytes_sent: float
    contributed: float
    coding: float
    phases: Mapping[str, float]
    waited: float
    rounds_per_day: float
    memory: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Seconds of a round."""
        return sum(self.phases.values())

    @property
    def bytes_per_day(self) -> float:
        """Bytes that a peer sends in a day, and that it receives."""
        return self.bytes_sent * self.rounds_per_day

    @property
    def share_not_training(self) -> float:
        """Share of the time in which the fastest peer does not train, from 0 to 1."""
        return self.waited * self.rounds_per_day / DAY

    def cost_per_day(self, price: float) -> float:
        """Price of the bytes that one peer sends in a day, at a price per GB (10⁹ bytes)."""
        return self.bytes_per_day / 1e9 * price


def estimate(run: RunPlan) -> Estimate:
    """What a peer of the run spends if all peers are there and no round fails."""
    others = (run.peers - 1) / run.peers
    contributed = others * run.contribution_bytes
    moved = contributed + others * run.reply_bytes
    before, within, after = coding_seconds(run)
    slowest, fastest = max(run.step_seconds), min(run.step_seconds)
    # With gradient averaging the fast peers gather more samples instead of waiting.
    behind = 0.0 if run.strategy is StrategyKind.GRADIENT_AVERAGING else run.steps_of_round * (slowest - fastest)
    phases = {
        "checking": CHECKING * run.tensor_bytes / 2**30,
        "looking": JOINING + JOINING_TRIPS * run.link.round_trip + behind,
        "preparing": before / run.cores,
        "allreduce": _allreduce_seconds(run, moved, within),
        "adopting": ADOPTING * run.tensor_bytes / 2**30 + after / run.cores,
    }
    seconds = sum(phases.values())
    waited = max(0.0, seconds - run.delay * fastest) if run.delay else seconds
    return Estimate(
        bytes_sent=moved,
        contributed=contributed,
        coding=before + within + after,
        phases=phases,
        waited=waited,
        rounds_per_day=DAY / (run.steps_of_round * fastest + waited),
        memory=memory_of_peer(run),
    )


def coding_seconds(run: RunPlan) -> tuple[float, float, float]:
    """CPU seconds of the code before the all-reduce, within it, and after it.

    Without TOP_K each peer encodes the shards of the others and the average of its own, and decodes both again.
    """
    values = run.parameters * torch.float32.itemsize / run.fragments / 2**30
    if not run.is_sparse:
        encoding, decoding = CODEC_SECONDS[run.compression]
        return 0.0, values * (encoding + decoding * 2 * (run.peers - 1) / run.peers), 0.0
    density = run.top_k.density
    replies = DECODING_UNION if run.sends_union else COMBINING * density * run.peers
    choosing = CHOOSING + CHOOSING_EACH * math.sqrt(density)
    return values * choosing, values * (replies + REDUCING * density), values * WRITING_BLOCKS


def _allreduce_seconds(run: RunPlan, moved: float, coding: float) -> float:
    """Two round trips, the bytes on the link, and the CPU time beside them, of which a part overlaps."""
    on_link = moved * 8 / (run.link.rate * TCP_PAYLOAD * LINK_USE)
    busy = 2 * moved / 2**30 * MOVING * (SEALING if run.encrypted else 1) + coding
    return 2 * run.link.round_trip + math.hypot(on_link, busy / run.cores)


def memory_of_peer(run: RunPlan) -> dict[str, int]:
    """Bytes that a training peer holds, by what they hold, without activations and the process itself.

    The parameters, gradients and statistics are where the model is; all others are on the CPU. Measured: DiLoCo with
    AdamW adds 8.6 times its float32 parameters, 3.5 times without the copy for newcomers (docs/design/performance.md);
    this reckons 9 and 4.
    """
    weights = run.parameters * run.dtype.itemsize
    averaged = run.parameters * run.averaged_dtype.itemsize
    statistics = weights * run.statistics
    memory = {"parameters": weights, "gradients": weights, "statistics of the optimizer": statistics}
    shared = weights + statistics
    match run.strategy:
        case StrategyKind.DILOCO:
            # With TOP_K the residual plays the part of outer momentum.
            momentum = {} if run.is_sparse else {"outer momentum": averaged}
            memory |= {"model after the last global step": averaged} | momentum | {"change since then": averaged}
            shared += averaged * (1 + len(momentum))
        case StrategyKind.GRADIENT_AVERAGING:
            memory["mean gradients"] = averaged
        case StrategyKind.LOCAL_SGD if run.delay:
            memory["copy that is averaged during training"] = int(run.tensor_bytes)
    if run.is_sparse:
        memory["residual of what was not sent"] = 4 * run.parameters
        memory["the next residual, until a result is applied"] = 4 * run.parameters // run.fragments
        if run.sends_union:
            memory["residual of the replies"] = 4 * run.parameters // run.peers
    elif run.error_feedback:
        memory["loss of the code"] = run.parameters * torch.float32.itemsize
    memory["results of a round"] = int(run.tensor_bytes)
    memory["parts under way"] = min(PARTS_UNDER_WAY, 2 * int(run.tensor_bytes))
    if run.share_state:
        memory["copy for newcomers, while one downloads"] = shared
    return memory


# Comparison with what was measured.


TOLERANCE = 0.15
"""Relative difference up to which an estimate counts as right."""

LEAST_SECONDS = 0.05
"""A shorter difference in a phase is not worth a remark."""

REMEDIES = {
    "looking": "peers arrive late or miss each other; `averaging explain` names them",
    "allreduce": "the link, or a member, is slower than planned; `averaging explain` names the slowest, and "
    "`averaging doctor --join HOST:PORT --deep` measures the path",
    "checking": "the processor does other work",
    "adopting": "the processor does other work",
    "preparing": "the tensors are copied from the GPU or to float32 first",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A planned quantity beside what the receipts say, and why they may differ.

    Attributes:
        planned: in the unit of `what`: seconds or bytes.
        measured: the median of the rounds that averaged.
        remark: why they differ; empty if they do not.
    """

    what: str
    planned: float
    measured: float
    remark: str = ""

    def __str__(self) -> str:
        text = size if self.what == "bytes sent" else duration
        ratio = f", {self.measured / self.planned - 1:+.0%}" if self.planned else ""
        return f"{self.what}: {text(self.measured)} measured, {text(self.planned)} planned{ratio}" + (
            f": {self.remark}" if self.remark else ""
        )


def compare(run: RunPlan, receipts: Iterable[Receipt]) -> list[Difference]:
    """Compares an estimate with the rounds that averaged.

    Raises:
        ConfigError: none did.
    """
    rounds = [receipt for receipt in receipts if receipt.averaged and receipt.accounts]
    if not rounds:
        raise ConfigError("no receipt is of a round that averaged, so there is nothing to compare with")
    planned = estimate(run)
    sent = Difference("bytes sent", planned.bytes_sent, statistics.median(each.bytes_sent for each in rounds))
    members = statistics.median(len(each.members) for each in rounds)
    remark = "other tensors, or another compression"
    if members != run.peers:
        remark = f"the groups had {members:g} members"
    elif run.is_sparse and sent.measured < sent.planned:
        remark = "the members changed the same elements, which averages hold only once"
    differences = [_remarked(sent, remark, 0.0)]
    for name in ("checking", "looking", "preparing", "allreduce", "adopting"):
        seconds = statistics.median(each.phases.get(name, 0.0) for each in rounds)
        phase = Difference(name, planned.phases.get(name, 0.0), seconds)
        differences.append(_remarked(phase, REMEDIES[name], LEAST_SECONDS))
    whole = Difference("round", planned.seconds, statistics.median(each.seconds for each in rounds))
    return [*differences, _remarked(whole, "see the phases", LEAST_SECONDS)]


def _remarked(difference: Difference, remark: str, least: float) -> Difference:
    """Adds the remark if the difference is large."""
    gap = abs(difference.measured - difference.planned)
    if gap <= max(least, TOLERANCE * difference.planned):
        return difference
    return Difference(difference.what, difference.planned, difference.measured, remark)
