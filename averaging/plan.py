"""What a run will cost a peer in bytes, seconds and memory, before it is started. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from averaging.errors import ConfigError
from averaging.protocol import MAX_GROUP_SIZE, CompressionType, TopK
from averaging.tensors import AVERAGED_DTYPES, codec_of

# Measured with two cores of a machine of 2025; docs/design/performance.md has the runs, docs/how-to/plan.md how far an
# estimate was from rounds on emulated links.
LINK_USE = 0.86  # part of a link's rate that an all-reduce reaches: 0.955 after headers, and 0.9 of what plain TCP has
MOVING = 1.0  # CPU seconds for each GiB that is sent or received over a direct connection, sums included
AROUND = 0.16  # seconds for each GiB of tensors, to look for NaN and to write the averages
JOINING, JOINING_TRIPS = 0.01, 3  # seconds, and round trips, until peers that arrive together are a group
PARTS_UNDER_WAY = 16 << 20  # bytes of parts that a peer holds while a round is in progress
INDEX_BITS = 12  # of the place of a value that top_k sends
CODING: Mapping[CompressionType, float] = {  # CPU seconds of a peer for a GiB of float32 in a round of many peers
    CompressionType.NONE: 0.0,
    CompressionType.FLOAT16: 0.28,
    CompressionType.BFLOAT16: 0.28,
    CompressionType.BLOCKWISE_INT8: 1.4,
    CompressionType.MEANSTD_16BIT: 2.0,
    CompressionType.UNIFORM_8BIT: 3.4,
    CompressionType.QUANTILE_8BIT: 9.6,
    CompressionType.TOP_K: 2.5,
}

COPY = "copy for newcomers, while one downloads"  # not with share_state=False
DAY = 86_400.0
DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LINK = re.compile(r"(?P<rate>\d+(?:\.\d+)?)(?P<unit>[kMG])bit(?:/s)?(?:/(?P<trip>\d+(?:\.\d+)?)ms)?")
TOP_K = TopK()


class StrategyKind(StrEnum):
    """What the tensors of a round are."""

    LOCAL_SGD = "local_sgd"  # the parameters, in their own dtype
    DILOCO = "diloco"  # their change since the last global step, in float32 for half-precision parameters
    GRADIENT_AVERAGING = "gradient_averaging"  # their gradients, likewise


def parse_dtype(name: str) -> torch.dtype:
    known = DTYPE_NAMES.get(name.lower(), name.lower())
    if known not in AVERAGED_DTYPES:
        raise ConfigError(f"{name!r} is no dtype that can be averaged; use one of {', '.join(DTYPE_NAMES)}")
    return AVERAGED_DTYPES[known]


@dataclass(frozen=True, slots=True)
class PeerLink:
    rate: float  # bits/s in each direction
    round_trip: float = 0.02  # seconds, to another peer

    @classmethod
    def parse(cls, text: str) -> PeerLink:
        """Reads `300Mbit/40ms`, or `300Mbit` with a round trip of 20 ms."""
        if (match := LINK.fullmatch(text.replace(" ", ""))) is None or not float(match["rate"]):
            raise ConfigError(f"{text!r} is no link; write its rate and round trip as 300Mbit/40ms or 1Gbit/5ms")
        rate = float(match["rate"]) * {"k": 1e3, "M": 1e6, "G": 1e9}[match["unit"]]
        return cls(rate, float(match["trip"]) / 1000) if match["trip"] else cls(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run that is planned."""

    parameters: int  # trained elements of the model
    dtype: torch.dtype = torch.float32  # theirs
    strategy: StrategyKind = StrategyKind.DILOCO
    compression: CompressionType = CompressionType.NONE  # TOP_K, with a density of 1/64 in 2 bits, for DiLoCo only
    peers: int = 8  # of a group
    link: PeerLink = PeerLink(100e6)  # of each peer; of unequal ones or directions the slowest
    sync_every: int = 100  # local steps between two rounds; with gradient averaging batches of a peer for a global step
    step_seconds: float = 1.0  # of a local step

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= MAX_GROUP_SIZE:
            raise ConfigError(f"a group has 2 to {MAX_GROUP_SIZE} peers, not {self.peers}")
        if self.compression.is_sparse and self.strategy is not StrategyKind.DILOCO:
            name = self.compression.name.lower()
            raise ConfigError(f"{name} sends changes of many steps, so that it is for diloco", "compression")
        if self.compression is CompressionType.VISIBLE:
            raise ConfigError(
                "how much visible sends depends on the learning rate and the weights; plan with another compression, "
                "and measure visible with averaging explain",
                "compression",
            )

    @property
    def averaged_dtype(self) -> torch.dtype:
        if self.strategy is StrategyKind.LOCAL_SGD or self.dtype.itemsize >= torch.float32.itemsize:
            return self.dtype
        return torch.float32

    @property
    def averaged_bytes(self) -> int:
        return self.parameters * self.averaged_dtype.itemsize

    @property
    def contribution_bytes(self) -> float:
        if self.compression.is_sparse:
            return self.parameters * TOP_K.density * (INDEX_BITS + TOP_K.bits) / 8
        return self.parameters * codec_of(self.compression, self.averaged_dtype).bytes_per_element

    @property
    def reply_bytes(self) -> float:
        if not self.compression.is_sparse:
            return self.contribution_bytes
        # All contributions as they came, or what any peer sends in 8 bits, with indices or a bit for each element. The
        # changes of the peers are taken as independent; the more they are alike, the less it is.
        share = 1 - (1 - TOP_K.density) ** self.peers
        union = self.parameters * min(share * (1 + INDEX_BITS / 8), share + 1 / 8)
        return min(self.peers * self.contribution_bytes, union)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one peer spends if all peers are there and no round fails."""

    bytes_sent: float  # bytes that it sends in a round, and that it receives
    phases: Mapping[str, float]  # seconds of a round by what they are for
    rounds_per_day: float  # rounds in a day, if training waits for each
    delay: int  # local steps after which a round has ended; with that `delay` of DiLoCo training waits for none
    memory: Mapping[str, int]  # bytes by what they hold

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def share_not_training(self) -> float:
        return self.seconds * self.rounds_per_day / DAY


def estimate(run: RunPlan, *, cores: float = 1.0) -> Estimate:
    """What a peer of the run spends, with so many processor cores for its rounds."""
    others = (run.peers - 1) / run.peers
    moved = others * (run.contribution_bytes + run.reply_bytes)
    coding = others * CODING[run.compression] * run.parameters * torch.float32.itemsize / 2**30
    on_link = moved * 8 / (run.link.rate * LINK_USE)
    # The processor's time beside the link overlaps with it in part; the largest elements are chosen before.
    busy = 2 * moved / 2**30 * MOVING + (0.0 if run.compression.is_sparse else coding)
    phases = {
        "looking": JOINING + JOINING_TRIPS * run.link.round_trip,
        "preparing": coding / cores if run.compression.is_sparse else 0.0,
        "allreduce": 2 * run.link.round_trip + math.hypot(on_link, busy / cores),
        "adopting": AROUND * run.averaged_bytes / 2**30,
    }
    seconds = sum(phases.values())
    rounds_per_day = DAY / (run.sync_every * run.step_seconds + seconds)
    return Estimate(moved, phases, rounds_per_day, math.ceil(seconds / run.step_seconds), memory_of_peer(run))


def memory_of_peer(run: RunPlan) -> dict[str, int]:
    """Bytes that a training peer holds with AdamW, by what they hold, without activations and the process itself.

    The parameters, gradients and statistics are where the model is; all others are on the CPU. Measured: DiLoCo with
    AdamW adds 8.6 times its float32 parameters, 3.5 times without the copy for newcomers; this reckons 9 and 4.
    """
    weights, averaged = run.parameters * run.dtype.itemsize, run.averaged_bytes
    memory = {"parameters": weights, "gradients": weights, "statistics of the optimizer": 2 * weights}
    shared = 3 * weights
    if run.strategy is StrategyKind.DILOCO:
        memory |= {"model after the last global step": averaged, "change since then": averaged}
        shared += averaged
        if run.compression.is_sparse:
            memory["residuals of what was not sent"] = 2 * 4 * run.parameters
        else:
            memory["outer momentum"] = averaged
            shared += averaged
    elif run.strategy is StrategyKind.GRADIENT_AVERAGING:
        memory["mean gradients"] = averaged
    memory["results of a round"] = averaged
    memory["parts under way"] = min(PARTS_UNDER_WAY, 2 * averaged)
    return memory | {COPY: shared}
