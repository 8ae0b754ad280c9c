"""The processes that train one copy of a model together, and how they decide alike.

Every rank of a site runs the same script. One of them, the leader, is asked where the ranks could decide differently:
it knows the other sites, and its clock counts. A rank whose parameters no lower rank holds owns a peer. With
DistributedDataParallel that is the leader alone, with `fully_shard` each rank that holds another shard.

Control data between the ranks is pickled, as torch's own collectives do: they are processes of one job, and trust each
other.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from averaging.common import parse_address
from averaging.config import AUTO, PeerConfig
from averaging.errors import AveragingError, ConfigError, SiteError
from averaging.receipts import PeerStatus
from averaging.training.layout import is_divided, layout_of

HANG_SECONDS = 1800.0
"""Seconds after which ranks that wait for one that hangs raise, as in torch. A rank that dies is noticed at once."""

INLINE_BYTES = 4088
"""Size of a message that needs one broadcast only."""


def ranks_of(process_group: object) -> list[int]:
    """The global ranks of a process group, None for the default one; ConfigError if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "process_group was given, but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first, in a script that torchrun starts"
        )
    if process_group is None:
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group must be a group of torch.distributed, such as torch.distributed.group.WORLD, not "
            f"{process_group!r:.100}"
        )
    return dist.get_process_group_ranks(process_group)


class ControlGroup:
    """A gloo group over the ranks of another group, so that control data never mixes with the training's collectives.

    Every method is collective: all ranks call it, in the same order. A method raises SiteError if a rank is lost, or
    keeps this one waiting for `timeout` seconds. `ranks` are global ones, see `ranks_of`.
    """

    def __init__(self, ranks: Sequence[int], timeout: float = HANG_SECONDS) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        # torch gives a group of some ranks the name of an earlier one that was closed, and its ranks may then read the
        # old addresses in the store and wait for ever. A group of all ranks has a number of its own.
        some = len(ranks) < dist.get_world_size()
        try:
            self._group: Any = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=some
            )
        except RuntimeError as error:
            raise SiteError(f"the ranks of this site cannot connect to each other: {error}") from error

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """The `content` of rank `source` at every rank; that of other ranks is ignored."""
        sends = self.rank == source
        # The first tensor has a fixed size, since the receivers do not know the length yet.
        first = torch.zeros(INLINE_BYTES + 8, dtype=torch.uint8)
        if sends:
            head = len(content).to_bytes(8, "little") + content[:INLINE_BYTES]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.broadcast_tensor(first, source)
        size = int.from_bytes(first[:8].numpy().tobytes(), "little")
        if size <= INLINE_BYTES:
            return first[8 : 8 + size].numpy().tobytes()
        rest = torch.empty(size - INLINE_BYTES, dtype=torch.uint8)
        if sends:
            rest.copy_(torch.frombuffer(bytearray(content[INLINE_BYTES:]), dtype=torch.uint8))
        self.broadcast_tensor(rest, source)
        return first[8:].numpy().tobytes() + rest.numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Writes rank `source`'s contiguous CPU tensor into `tensor` at every rank."""
        with self._reaching():
            dist.broadcast(tensor, group=self._group, group_src=source)

    def all_gather(self, item: object) -> list[Any]:
        """The items of all ranks, in their order."""
        items: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(items, item, group=self._group)
        return items

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self._reaching():
            dist.barrier(self._group)

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one raise."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(Exception):  # it may have been destroyed with the default group
                dist.destroy_process_group(group)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise SiteError(
                f"rank {self.rank} has lost another rank, which has ended or hangs ({reason:.200}); end this process, "
                "so that torchrun starts all ranks again"
            ) from error


T = TypeVar("T")

STATUS_SECONDS = 0.25
"""Seconds between two times that the leader of a site tells its status to the other ranks."""


class Site:
    """A site of one process, which decides alone."""

    rank, size = 0, 1
    shard, shards = 0, 1
    leads = owns = True
    layout = ""
    group: Any = None  # the process group of its ranks; None is the default one

    def broadcast_from_leader(self, question: Callable[[], T]) -> T:
        """Runs `question` at the leader and returns its result at every rank; raises its exception there, if it does.

        Whether a round is due, and all else that depends on clocks, chance or other peers, is such a question. The
        result must be picklable.
        """
        return question()

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` at every rank and returns all results in their order; raises at every rank if one has failed."""
        return [work()]

    def broadcast_from_owner(self, make: Callable[[], T]) -> T:
        return make()

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the owner's tensors to the other ranks that hold the same shard."""

    def close(self) -> None:
        """Frees the connections between the ranks."""


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    error: BaseException | None = None
    news: Any = None


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """What the leader of a site knows: the peers, the status and state version of its own, and whether it has left."""

    peers: frozenset[str]
    status: PeerStatus | None
    version: int
    left: bool


NO_STATUS = LeaderStatus(frozenset(), None, 0, False)


class LeaderStatusRelay:
    """Keeps what the leader of a site tells the other ranks along with its answers, so that it is alike everywhere."""

    def __init__(self, read: Callable[[], LeaderStatus]) -> None:
        self._read = read
        self._next = math.inf
        self.last = NO_STATUS

    def latest(self) -> LeaderStatus | None:
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + STATUS_SECONDS
        return self._read()

    def tell_now(self, site: Site) -> None:
        """Broadcasts the status to all ranks now, not only with the next answer after a while."""
        self._next = 0.0
        site.broadcast_from_leader(lambda: None)


class ProcessGroupSite(Site):
    """A site whose ranks are those of a process group. Every method is collective."""

    def __init__(self, group: object, parameters: Mapping[str, torch.Tensor], relay: LeaderStatusRelay) -> None:
        ranks, self.group = ranks_of(group), group
        layout = layout_of(parameters, len(ranks))
        self._group = ControlGroup(ranks)
        self.rank, self.size = self._group.rank, self._group.size
        self.shards, self.layout = layout.shards, layout.name
        self.shard = layout.shard_of[self.rank]
        owner = layout.shard_of.index(self.shard)
        self.leads, self.owns = self.rank == 0, self.rank == owner
        self._relay = relay
        self._answering = False
        self._lost = ""
        self._replicas = self._group if self.shards == 1 else None
        copies = [ranks[other] for other, shard in enumerate(layout.shard_of) if shard == self.shard]
        if self.shards > 1 and len(copies) > 1:
            self._replicas = ControlGroup(copies)

    def broadcast_from_leader(self, question: Callable[[], T]) -> T:
        if self._answering:
            return question()  # part of the answer to another question, which only the leader is asked
        answer: T = self._broadcast(self.leads, question, self._group, self._relay.latest)
        return answer

    def broadcast_from_owner(self, make: Callable[[], T]) -> T:
        if self._replicas is None:
            return make()
        made: T = self._broadcast(self.owns, make, self._replicas, lambda: None)
        return made

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        failure: BaseException | None = None
        answer = _Answer()
        try:
            answer = _Answer(work())
        except BaseException as error:
            failure, answer = error, _Answer(error=_portable(error, self.rank))
        with self._collective(failure):
            heard = self._group.all_gather(answer)
        if failure is not None:
            raise failure
        for other in heard:
            if other.error is not None:
                raise other.error
        return [other.value for other in heard]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._replicas is None:
            return
        with self._collective():
            for tensor in tensors:
                whole = tensor.detach()
                sent = whole.to("cpu").contiguous()
                self._replicas.broadcast_tensor(sent)
                if not self.owns and sent.data_ptr() != whole.data_ptr():
                    whole.copy_(sent)

    def close(self) -> None:
        self._lost = "the averager was closed"
        self._group.close()
        if self._replicas is not None:
            self._replicas.close()

    def _broadcast(self, asked: bool, question: Callable[[], Any], group: ControlGroup, news: Callable[[], Any]) -> Any:
        """Runs `question` at the rank that is `asked`; all ranks of the group return its result, or raise."""
        # What one rank raises before the broadcast is sent as the answer: the others wait for one, and would wait until
        # the group's time-out.
        failure: BaseException | None = None
        packed = b""
        if asked:
            self._answering = True
            try:
                packed = pickle.dumps(_Answer(question(), news=news()))
            except BaseException as error:
                failure, packed = error, pickle.dumps(_Answer(error=_portable(error, self.rank), news=news()))
            finally:
                self._answering = False
        with self._collective(failure):
            packed = group.broadcast(packed)
        answer: _Answer = pickle.loads(packed)  # noqa: S301 - of a rank of this job, see above
        if answer.news is not None:
            self._relay.last = answer.news
        if failure is not None:
            raise failure
        if answer.error is not None:
            raise answer.error
        return answer.value

    @contextmanager
    def _collective(self, failure: BaseException | None = None) -> Iterator[None]:
        """Context of one collective call. If it raises, this rank is out of step, and later calls raise SiteError."""
        if self._lost:
            raise SiteError(f"rank {self.rank} of this site cannot go on: {self._lost}") from failure
        try:
            yield
        except BaseException as error:
            self._lost = f"it was interrupted by {type(error).__name__}: {error}"[:500]
            raise
        if failure is not None and not isinstance(failure, Exception):
            self._lost = f"it was interrupted by {type(failure).__name__}"


NO_GROUP: object = object()
"""Default of `process_group`: single-process training. A sentinel, since `dist.group.WORLD` is None before
init_process_group()."""


def site_of(process_group: object, parameters: Mapping[str, torch.Tensor], relay: LeaderStatusRelay) -> Site:
    if process_group is not NO_GROUP:
        return ProcessGroupSite(process_group, parameters, relay)
    divided = next((name for name, parameter in parameters.items() if is_divided(parameter)), None)
    if divided is not None:
        raise ConfigError(
            f"parameter {divided!r} is divided between processes; give the averager their process group, such as "
            "process_group=torch.distributed.group.WORLD"
        )
    return Site()


def _portable(error: BaseException, rank: int) -> BaseException:
    if not isinstance(error, Exception):
        return SiteError(f"rank {rank} of this site was interrupted by {type(error).__name__}; end this process, too")
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    except Exception:
        kind = ConfigError if isinstance(error, ConfigError) else AveragingError
        return kind(f"{type(error).__name__} at rank {rank} of this site: {error}")
    return error


# The options of one rank of a site: what all ranks must have alike, and what each rank's peer makes of them.


OF_ONE_RANK = frozenset(
    {
        *("listen", "advertise", "direct_listen", "direct_advertise"),
        *("tls_ca", "tls_cert", "tls_key", "token_file", "receipts", "metrics_listen"),
    }
)
"""Options that may differ between ranks, since these may be on different machines."""


def of_rank(config: PeerConfig, site: Site, leader: str) -> PeerConfig:
    """The options of this rank's peer.

    A rank that leads no site, but owns a peer, joins through the leader as well. It listens at the port of `listen`
    plus the number of its shard, unless that is 0, and keeps a file of receipts of its own. The ports of direct
    connections and of metrics are chosen likewise.
    """
    if site.leads:
        return config
    if not site.owns:
        return replace(config, share_state=False, receipts=None, metrics_listen=None)
    receipts = None if config.receipts is None else f"{os.fspath(config.receipts)}.shard{site.shard}"
    return replace(
        config,
        join=[*config.join, leader],
        listen=_shifted(config.listen, site.shard),
        metrics_listen=_shifted(config.metrics_listen, site.shard),
        advertise=_shifted(config.advertise, site.shard),
        direct_listen=_shifted(config.direct_listen, site.shard),
        direct_advertise=None if config.direct_advertise is None else config.direct_advertise + site.shard,
        receipts=receipts,
    )


def described(config: PeerConfig, **further: object) -> dict[str, str]:
    """What all ranks of a site must have alike, by name."""
    own = {
        option.name: repr(getattr(config, option.name)) for option in fields(config) if option.name not in OF_ONE_RANK
    }
    return own | {name: repr(value) for name, value in further.items()}


def check_alike(descriptions: Sequence[Mapping[str, str]]) -> None:
    """Raises ConfigError if two ranks of a site were started differently; the message names the first difference."""
    for rank, description in enumerate(descriptions):
        for name, value in descriptions[0].items():
            if description[name] != value:
                raise ConfigError(
                    f"the ranks of a site need the same options, but {name} is {value:.200} at rank 0 and "
                    f"{description[name]:.200} at rank {rank}"
                )


@overload
def _shifted(address: str, by: int) -> str: ...
@overload
def _shifted(address: str | None, by: int) -> str | None: ...


def _shifted(address: str | None, by: int) -> str | None:
    if address is None or address == AUTO:
        return address
    host, port = parse_address(address)
    return f"{host}:{port + by if port else 0}"
