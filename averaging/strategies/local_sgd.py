"""Averaging of the parameters every few steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from averaging.observe.receipts import Receipt
from averaging.peer.topics import Adopt, Topic, TopicOptions
from averaging.protocol.messages import CompressionType
from averaging.state.snapshots import Extras
from averaging.strategies.averaging_schedule import AveragingSchedule
from averaging.strategies.base import Strategy
from averaging.strategies.delayed_update import DelayedUpdate
from averaging.training.history import training_on
from averaging.training.signal_safe_future import SignalSafeFuture
from averaging.training.training import Training
from averaging.training.training_state import count_in


class LocalSGD(Strategy):
    """Each peer trains on its own, and every `every` steps the parameters are averaged (Stich, 2018, arXiv:1805.09767).

    The training thread waits for the round, unless `overlap` is set. A peer that is alone goes on at once. If a round
    fails, the next one is `every` steps later.

    Args:
        every: local steps between two rounds, at least 1.
        statistics: whether the optimizer's statistics (momentum, second moments) are averaged along; else they stay
            each peer's own. Peers meet when all have the same ones: a parameter without a gradient so far has none.
            They are never compressed: what a code makes of a small second moment, the optimizer divides by.
        overlap: whether training goes on during the round. The change, the average minus what was sent, is added to the
            parameters when it is there; the training thread only copies. Of a second moment, and of a buffer that is a
            running variance, so much of it is added as would be left by now.
        compression: see `Strategy`.
        error_feedback: see `Strategy`.
        max_norm: of the gradients of each step, see `Strategy`.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(
        self,
        every: int,
        *,
        statistics: bool = False,
        overlap: bool = False,
        compression: CompressionType | str | None = None,
        error_feedback: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(compression=compression, error_feedback=error_feedback, max_norm=max_norm)
        self._turns = AveragingSchedule(every)
        self.statistics = statistics
        self.overlap = overlap
        self._topic: Topic | None = None
        self._averaged: list[torch.Tensor] = []
        self._late: DelayedUpdate | None = None  # with `overlap`: what is averaged instead, and added
        self._pending: SignalSafeFuture[Receipt] | None = None
        self._replaced = False  # the parameters have been loaded since the pending round began
        self._told: Mapping[str, bytes] = {}  # what the others have announced, when it was last looked at

    @property
    def every(self) -> int:
        """Local steps between two rounds."""
        return self._turns.every

    def __repr__(self) -> str:
        flags = "".join(f", {name}=True" for name in ("statistics", "overlap") if getattr(self, name))
        return f"LocalSGD(every={self.every}{flags}{self._options()})"

    def start(self, training: Training) -> None:
        """Statistics come into being with the first gradients, so what is averaged along is looked up at each turn."""
        if not self.statistics:
            self._make_topic(training, training.tensors)

    def joined(self, training: Training) -> None:
        """The statistics of a state are other tensors, and a checkpoint may have nothing to `load` in it."""
        super().joined(training)
        self._replaced = True
        if self.statistics:
            self._topic = None

    def after_step(self, training: Training) -> None:
        """Averages if it is time."""
        self._turns.count(training.now())
        if self._gives_way(training):
            return
        topic = self._topic or self._make_topic(training, training.tensors | training.statistics())
        if self._pending is not None:
            if not self._pending.done():
                return
            self._apply(training, self._pending)
        if not self._turns.is_due(training.now(), training.awaited_until(topic)):
            return
        if self.statistics:
            topic = self._topic_by_now(training, topic)
        self._turns.taken()  # before the round: its result is what newcomers get, with the steps since then
        if self._late is not None:
            self._late.copy()
            self._replaced = False
            self._pending = training.begin(topic, awaited=training_on)
        else:
            self._note(training, training.average(topic, awaited=training_on))

    def state(self) -> Extras:
        """How far it is on the way to the next turn."""
        return Extras({}, {"since": self._turns.steps})

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Takes over how far it was; a change that is on its way is of other parameters, and not added."""
        self._turns.steps = count_in(user, "since")
        self._replaced = True

    def _gives_way(self, training: Training) -> bool:
        """Takes over the run of another origin, if there is one that counts more; whether that was done."""
        told = training.told(wait=False)
        if told is self._told and not self._catching_up.busy:
            return False
        self._told = told
        return self.keep_up(training, self.others(training, told))

    def finish(self, training: Training) -> None:
        """Waits for the change that is on its way."""
        if self._pending is not None:
            self._apply(training, self._pending)

    def conclude(self, training: Training, partners: Collection[str], patience: float) -> Receipt | None:
        """Averages the parameters of all once more, so that all end with the same."""
        topic = training.topic("", training.tensors, adopt=Adopt.WHOLE, commits=True, compression=self.compression)
        return self._average_at_the_end(training, topic, patience)

    def _make_topic(self, training: Training, tensors: dict[str, torch.Tensor]) -> Topic:
        self._averaged = list(tensors.values())
        options: TopicOptions = {"compression": self.compression, "error_feedback": self.error_feedback}
        if self.overlap:
            # Under the run's own key: those who do not overlap, and auxiliaries, average with those who do.
            self._late = DelayedUpdate(tensors, _kinds(training, tensors))
            options["adopt"] = Adopt.CHANGE
            self._topic = training.topic("", self._late.copies, **options)
        else:
            # Training waits for the round, so nobody looks at the tensors while some are averaged and some are not.
            options["commits"] = options["in_place"] = True
            self._topic = training.topic("", tensors, **options)
        self._topic = self._topic.sending_exactly(tensors.keys() - training.tensors.keys())
        return self._topic

    def _topic_by_now(self, training: Training, topic: Topic) -> Topic:
        """The topic, made anew if need be: statistics come with a parameter's first gradient, and some are replaced."""
        present = training.tensors | training.statistics()
        same = [id(tensor) for tensor in present.values()] == [id(tensor) for tensor in self._averaged]
        return topic if same else self._make_topic(training, present)

    def _note(self, training: Training, receipt: Receipt) -> None:
        """What a peer has learnt alone is the run's state, too."""
        training.forget()  # else those who waited for this round would be taken for waiting for the next
        training.tell(self.progress(training).pack(), soon=False)
        if not receipt.averaged and training.is_alone:
            with training.replacing():
                return

    def _apply(self, training: Training, pending: SignalSafeFuture[Receipt]) -> None:
        try:
            receipt = training.receipt_of(pending)
        finally:
            if pending.done():  # a KeyboardInterrupt ends the wait, not the round
                self._pending = None
        self._note(training, receipt)
        if not receipt.averaged or self._replaced or self._late is None:
            return
        with training.replacing():
            self._late.add()


def _kinds(training: Training, tensors: Iterable[str]) -> dict[str, list[str]]:
    """The names of statistics and buffers, by the kind that they are of, such as `exp_avg_sq` or `running_var`."""
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        if name not in training.parameters:
            kind = name.rpartition(".")[2] if name in training.buffers else name.partition("/")[0]
            kinds.setdefault(kind, []).append(name)
    return kinds
