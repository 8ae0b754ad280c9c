"""`RunSampler`: the samples that one peer of a run trains."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler

from averaging.averager import DecentralizedAverager
from averaging.common import InProcess, is_count
from averaging.data.dealing import DEFAULT_BLOCKS, DataRecord, DataStatistics, Dealer, Division
from averaging.errors import ClosedError, ConfigError, ProtocolViolationError, StateError

logger = logging.getLogger("averaging.data")

POLL = 0.02  # seconds between two looks while this peer waits for a claim to settle, or for the others
ASK_AGAIN_SECONDS = 20.0  # the ranks of a site meet so often while they wait for other peers
SIGN_OF_LIFE_SECONDS = 10.0  # a peer announces so often that it has trained more, within a block
AHEAD = 2  # claims beyond the block that is handed out


class RunSampler(Sampler[int], InProcess):
    """Deals out the samples of each epoch among the peers that are there, so that all of them together train each once.

    ```python
    sampler = RunSampler(dataset, opt)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in sampler.epochs(3):
        for inputs, targets in loader:
            loss(model(inputs), targets).backward()
            opt.step(batch_size=len(inputs))
            opt.zero_grad()
    ```

    Peers may come, leave, die and start again at any time. Each sample is trained at least once in an epoch. A block of
    samples is trained twice, in part, if a peer dies in the midst of it. See docs/how-to/data.md.

    One iteration ends when no block is free. `epochs` waits then until the other peers have trained their last blocks,
    and repeats the epoch if one of them is lost. Without it, each iteration waits so at its beginning, and the samples
    of peers that are lost at the very end of the training are not dealt again.

    In a site each rank makes a sampler with the same arguments and iterates alike, and gets its part of each block.

    Args:
        dataset: A map-style dataset, or its number of samples, the same at all peers.
        block_size: Samples of a block, the same at all peers; about a thousandth of the dataset if None. At most 4096
            blocks are possible. In a site it must be a multiple of its ranks.
        shuffle: Whether the samples of each epoch are in random order, the same for all peers.
        seed: Of that order; the same at all peers.
        batch_size: Samples of this process in each `opt.step()`. None if you give them to `opt.step` as its
            `batch_size`; give them here if that one counts tokens. One or the other tells the sampler what is trained,
            since a loader fetches ahead. Without both, a block counts as trained at the end of the pass only.

    Raises:
        ConfigError: An argument is invalid, or the run divides its dataset otherwise.
    """

    _instead = "the worker processes of a DataLoader do not need it"

    def __init__(
        self,
        dataset: Sized | int,
        opt: DecentralizedAverager,
        *,
        block_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        length = dataset if isinstance(dataset, int) else _length(dataset)
        if not isinstance(opt, DecentralizedAverager):
            raise ConfigError(f"opt must be a DecentralizedAverager, not {type(opt).__name__}")
        if batch_size is not None and (not is_count(batch_size) or not batch_size):
            raise ConfigError(f"batch_size must be a whole number, at least 1, not {batch_size!r}")
        if not is_count(seed):
            raise ConfigError(f"seed must be a whole number, at least 0, not {seed!r}")
        self._site, self._records = opt.site, opt.data_records
        ranks = self._site.size
        if block_size is None:
            block_size = -(-max(1, -(-length // DEFAULT_BLOCKS)) // ranks) * ranks
        self._division = Division(length, block_size, seed if shuffle else None)
        if block_size % ranks:
            raise ConfigError(f"block_size {block_size} must be a multiple of the {ranks} ranks of this site")
        name = self._records.endpoint if self._records else ""
        self._dealer = Dealer(self._division, name)
        self._batch_size = batch_size
        self._warned: set[str] = set()
        self._announced, self._announced_at = -1, 0.0
        self._is_known = False  # a restarted peer is not, until its earlier record has expired
        self._order: tuple[int, torch.Tensor] | None = None
        # Blocks that were handed out, with the number of samples that this rank has handed out up to their end.
        self._handed: deque[tuple[int, int]] = deque()
        self._handed_out = self._trained = self._last_step = 0
        self._settled = False  # whether there is work for the next pass
        self._epoch_of_pass = 0
        self._hook = opt.register_step_post_hook(self._after_step)
        self._site.broadcast_from_leader(self._look_at_first)

    @property
    def epoch(self) -> int:
        """The present epoch of the run, counted from 0. At the other ranks of a site, as of the last pass."""
        return self._dealer.epoch

    @property
    def statistics(self) -> DataStatistics:
        """What this peer has trained, and at most how often twice; at rank 0 of a site."""
        done, blocks = self._dealer.done.bit_count(), self._division.blocks
        return replace(self._dealer.statistics, epoch=self.epoch, blocks=blocks, done=done)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the number of the epoch for each pass, until `count` epochs of the run are trained by all peers.

        A newcomer begins with the run's epoch. An epoch comes again for the samples of a peer that was lost at its end.

        Raises:
            ConfigError: count is no number above 0.
            ClosedError: the averager was closed.
        """
        if not is_count(count) or not count:
            raise ConfigError(f"count must be a number of epochs, at least 1, not {count!r}")
        try:
            while True:
                self._end_pass()
                if not self._wait_for_work(count):
                    return
                self._settled = True
                yield self.epoch
        finally:
            self._settled = False
            self._end_pass()
            self._announce_quietly()

    def __iter__(self) -> Iterator[int]:
        if not self._settled:  # `epochs` has not waited
            self._end_pass()
            self._wait_for_work(None)
        self._settled = False
        return self._pass()

    def state_dict(self) -> dict[str, Any]:
        """The epoch and its trained blocks, for a checkpoint of this peer; at rank 0 of a site."""
        blocks = self._division.blocks
        return {
            "division": self._division.digest.hex(),
            "epoch": self._dealer.epoch,
            "done": self._dealer.done.to_bytes(-(-blocks // 8), "little").hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a checkpoint was made, unless the run is further: then its records count.

        Raises:
            StateError: it is malformed, or of a dataset that is divided otherwise.
        """
        try:
            epoch, done = state["epoch"], int.from_bytes(bytes.fromhex(state["done"]), "little")
        except (KeyError, TypeError, ValueError):
            epoch = None
        if not is_count(epoch):
            raise StateError("the checkpoint of the sampler is malformed")
        if state.get("division") != self._division.digest.hex():
            raise StateError("the checkpoint's dataset has another length, block_size or seed")
        self._dealer.take_over_done(epoch, done)

    # What is trained

    def _after_step(self, optimizer: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        samples = self._batch_size or options.get("batch_size")  # the step's may count tokens
        if samples is None:
            self._warn_once(
                "the sampler does not know how many samples a step trains, so a block counts as trained at the end of "
                "the pass only, and more is trained twice if this peer dies; give RunSampler or opt.step a batch_size"
            )
            return
        self._last_step = samples
        self._count_trained(samples)

    def _count_trained(self, samples: int) -> None:
        samples = min(samples, self._handed_out - self._trained)
        self._trained += samples
        self._dealer.trained(samples * self._site.size)
        while self._handed and self._handed[0][0] <= self._trained:
            self._dealer.finish(self._handed.popleft()[1])
        if self._records is not None:
            self._announce()

    def _end_pass(self) -> None:
        """The loop over a pass has ended: what was handed out and not trained in it is given back.

        A loader with `drop_last` drops less than a batch, which counts as trained.
        """
        left = self._handed_out - self._trained
        if left and (not self._last_step or left < self._last_step):
            self._count_trained(left)
        self._trained = self._handed_out
        self._handed.clear()
        self._dealer.release()

    # At the leader of a site

    def _look_at_first(self) -> None:
        """Checks that the run divides the dataset alike, see `is_outvoted`; `_see` warns of single peers."""
        alike, others = self._see()
        if self._records is not None and self._records.is_outvoted(others, alike):
            raise ConfigError(
                f"{', '.join(others)} of this run divide their dataset otherwise; give all peers the same dataset, "
                "block_size, seed and shuffle"
            )

    def _see(self) -> tuple[set[str], list[str]]:
        """Takes what the other peers announce. Returns which divide the dataset alike, and which otherwise."""
        if self._records is None:
            return set(), []
        live, gone = self._records.read()
        own, dealer = self._division.digest, self._dealer
        for packed in gone:
            record = self._read(packed, "a peer that has left")
            if record is not None and record.digest == own and record.epoch == dealer.epoch:
                dealer.take_over_done(record.epoch, record.done)
        records = {name: record for name, packed in live.items() if (record := self._read(packed, name)) is not None}
        alike = {name: record for name, record in records.items() if record.digest == own}
        others = sorted(records.keys() - alike.keys())
        for name in others:
            self._warn_once(f"{name} divides the dataset otherwise, so its samples and ours may be the same")
        dealer.see(alike, time.monotonic())
        return set(alike), others

    def _read(self, packed: bytes, name: str) -> DataRecord | None:
        try:
            return DataRecord.unpack(packed)
        except ProtocolViolationError as error:
            self._warn_once(f"{name} announces no data that can be read: {error}")
            return None

    def _announce(self) -> None:
        now = time.monotonic()
        is_new = self._dealer.version != self._announced or now - self._announced_at >= SIGN_OF_LIFE_SECONDS
        if self._records is not None and is_new:
            self._announced, self._announced_at = self._dealer.version, now
            self._records.announce(self._dealer.record.pack())

    def _next_block(self) -> tuple[int, int] | None:
        """Returns the epoch and the next block for this peer; None if there is none, or the averager was closed."""
        records = self._records
        while records is not None:
            try:
                records.check()
                self._see()
                if self._dealer.epoch != self._epoch_of_pass:
                    return None  # the others have ended the epoch; a pass never runs on into the next one
                now = time.monotonic()
                self._dealer.claim(now, AHEAD)
                self._announce()
                if not self._dealer.has_claims_to_begin:
                    return None
                self._is_known = self._is_known or records.is_published
                block = self._dealer.begin(now) if self._is_known else None
                self._announce()
            except ClosedError:
                return None
            if block is not None:
                return self._dealer.epoch, block
            time.sleep(POLL)
        return None

    def _wait_for_work(self, epochs: int | None) -> bool:
        """Waits, at all ranks, until there is work in this epoch or the next. False after `epochs`."""
        while True:
            epoch, has_work = self._site.broadcast_from_leader(lambda: self._look_for_work(epochs))
            if not self._site.leads:
                self._dealer.take_over_done(epoch, 0)
            if epochs is not None and epoch >= epochs:
                return False
            if has_work:
                return True

    def _look_for_work(self, epochs: int | None) -> tuple[int, bool]:
        """Waits for a while. Returns the epoch, and whether there is a free block."""
        records, dealer = self._records, self._dealer
        until = time.monotonic() + ASK_AGAIN_SECONDS
        while records is not None and time.monotonic() < until:
            records.check()
            self._see()
            if dealer.is_complete:
                dealer.next_epoch()
            self._announce()
            if (epochs is not None and dealer.epoch >= epochs) or dealer.has_free(time.monotonic()):
                records.holders, self._epoch_of_pass = (), dealer.epoch
                return dealer.epoch, True
            records.holders = dealer.holders()
            time.sleep(POLL)
        return dealer.epoch, False

    # The samples

    def _pass(self) -> Iterator[int]:
        while (dealt := self._site.broadcast_from_leader(self._next_block)) is not None:
            epoch, block = dealt
            indices = self._indices(epoch, block)
            for number, index in enumerate(indices, 1):
                self._handed_out += 1
                if (claim := self._dealer.claims.get(block)) is not None:
                    claim.handed += 1
                if number == len(indices):
                    self._handed.append((self._handed_out, block))
                yield index
                if not self._has(block):
                    break

    def _has(self, block: int) -> bool:
        """Whether a block that was begun is still this peer's. The ranks of a site always end what they have begun."""
        if self._site.size > 1 or self._records is None:
            return True
        if self._records.have_changed:
            self._see()
            self._announce_quietly()
        return block in self._dealer.claims

    def _announce_quietly(self) -> None:
        with suppress(ClosedError):  # the pass ends with the next block
            self._announce()

    def _indices(self, epoch: int, block: int) -> list[int]:
        """The samples of a block for this rank; all ranks get equally many, in the last block some of them twice."""
        size, ranks = self._division.size(block), self._site.size
        each = -(-size // ranks)
        start = block * self._division.block_size
        places = [start + min(self._site.rank * each + offset, size - 1) for offset in range(each)]
        if self._division.seed is None:
            return places
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self._division.seed * 1_000_003 + epoch) % (1 << 63))
            self._order = epoch, torch.randperm(self._division.length, generator=generator)
        return [int(index) for index in self._order[1][places]]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < 64:
            self._warned.add(message)
            logger.warning("%s", message)


def _length(dataset: Sized) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{type(dataset).__name__} has no length; index the samples of a dataset that is iterated, see "
            "docs/how-to/data.md"
        ) from None
