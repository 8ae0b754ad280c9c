"""DiLoCo: many local steps between two rounds, and an outer optimizer that applies their change."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from averaging.common import is_finite, one_of
from averaging.errors import AveragingError, ConfigError, StateError, TensorError
from averaging.peer import Adopt, RoundOptions, SparseFeedback, Topic
from averaging.protocol import CompressionType, MeanOver, TopK
from averaging.receipts import Receipt
from averaging.state import ExtraState
from averaging.strategies.base import IMMEDIATELY, Due
from averaging.strategies.lockstep import LockstepStrategy
from averaging.strategies.schedule import Schedule, check_whole_number, make_schedule
from averaging.tensors import sharing_memory
from averaging.training import (
    BackgroundDownload,
    GroupProgress,
    History,
    Others,
    PendingRound,
    StrategyContext,
    count_in,
    full_precision,
    load_optimizer,
    needs_closure,
    pack_optimizer,
    restored_on_error,
    take_tensor,
    under_own_names,
)

OuterFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

NESTEROV: OuterFactory = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the DiLoCo paper."""

PLAIN: OuterFactory = partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer with `top_k`, whose residual takes the part of momentum, and of local SGD."""

logger = logging.getLogger("averaging.training")


TOP_K_DEFAULTS: Mapping[str, Any] = {"density": 1 / 64, "bits": 2, "decay": 0.95, "mean_over": MeanOver.SENDERS}
"""The options of `top_k`."""


class Fragment:
    """A piece of the model with its outer state.

    Attributes:
        parameters: parameters of the model, trained by the inner optimizer.
        anchors: the parameters after the last global step, on the CPU.
        changes: the pseudo-gradient, anchors minus parameters; after a round its average.
        progress: what the outer optimizer changes in its parameter groups.
        buffers: pairs of a model's buffer and its copy; after a round the copy holds the average.
    """

    def __init__(
        self,
        number: int,
        parameters: dict[str, torch.Tensor],
        anchors: dict[str, torch.nn.Parameter],
        changes: dict[str, torch.Tensor],
        topic: Topic,
        outer: torch.optim.Optimizer,
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.number = number
        self.parameters, self.anchors, self.changes, self.buffers = parameters, anchors, changes, buffers
        self.topic, self.outer, self.progress = topic, outer, GroupProgress(outer)
        self._measured: dict[str, torch.Tensor] = {}
        tied = sharing_memory(list(parameters.values()))
        self._tied = [name for place, name in enumerate(parameters) if place in tied]

    @property
    def feedback(self) -> SparseFeedback | None:
        """What was not sent yet, with `top_k`."""
        return self.topic.feedback if isinstance(self.topic.feedback, SparseFeedback) else None

    @torch.no_grad()
    def anchor(self) -> None:
        """Sets the anchors to the present parameters."""
        for name, parameter in self.parameters.items():
            self.anchors[name].copy_(parameter)

    @torch.no_grad()
    def measure(self, *, keep: bool = False) -> None:
        """Computes the pseudo-gradient and copies the buffers.

        Args:
            keep: whether `step` needs the present parameters: if training goes on and they are mixed with the result.
        """
        self._measured = {name: parameter.clone() for name, parameter in self.parameters.items()} if keep else {}
        for name, parameter in self.parameters.items():
            anchor = self.anchors[name]
            # What rounding has changed is measured again and again if it is not sent, so it must not be in a residual.
            start = anchor if self.feedback is None else anchor.to(parameter.dtype).to(anchor.dtype)
            torch.sub(start, parameter.to("cpu", anchor.dtype), out=self.changes[name])
        for buffer, copied in self.buffers:
            copied.copy_(buffer)

    def step(self, alpha: float) -> None:
        """Makes the outer step and writes its result and the averaged buffers to the model.

        Args:
            alpha: see `DiLoCo`; of the local steps since `measure` if that has kept the parameters.
        """
        for name, anchor in self.anchors.items():
            anchor.grad = self.changes[name]
        with self.progress.observed():
            self.outer.step()
        with torch.no_grad():
            # Copies of parameters that share memory, made before any of them is written.
            was = {name: self.parameters[name].clone() for name in self._tied} if alpha else {}
            for name, parameter in self.parameters.items():
                self.anchors[name].grad = None
                result = self.anchors[name].to(parameter.device, parameter.dtype)
                if name in self._measured:
                    # Not lerp_: the local parameters also hold what was not sent, which is sent later.
                    since = was.get(name, parameter) - self._measured[name]
                    parameter.copy_(result + alpha * since)
                elif alpha:
                    # lerp_ of equal values is exact, so parameters that nobody trains keep a pseudo-gradient of 0.
                    parameter.copy_(was.get(name, parameter).lerp_(result, 1 - alpha))
                else:
                    parameter.copy_(result)  # also replaces infinity and NaN, which lerp_ would keep
            self._measured = {}
            for buffer, average in self.buffers:
                buffer.copy_(average)

    @torch.no_grad()
    def local_steps(self) -> dict[str, torch.Tensor]:
        """The change by the local steps since the last global step: parameters minus anchors."""
        return {
            name: parameter.to("cpu", self.anchors[name].dtype) - self.anchors[name]
            for name, parameter in self.parameters.items()
        }

    def steps_to_keep(self, *, discarded: bool) -> dict[str, torch.Tensor]:
        """The local steps that no result includes, by name; with `top_k` also those of an open change are excluded.

        Args:
            discarded: whether another peer's result may include the local steps up to the last round.
        """
        if not discarded:
            return self.local_steps()
        if self.feedback is None:
            return {}
        change = self.feedback.open_change()  # what was not sent of it stays in the residual
        return {name: steps + change[name] if name in change else steps for name, steps in self.local_steps().items()}

    @torch.no_grad()
    def export(self) -> None:
        """Sets the parameters to the anchors, which drops the local steps since the last global step."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.anchors[name])

    @torch.no_grad()
    def rebase(self, steps: Mapping[str, torch.Tensor]) -> None:
        """Sets the parameters to the anchors plus `steps`; leaves those without an entry as they are."""
        for name, change in steps.items():
            self.parameters[name].copy_(self.anchors[name] + change)


def cut(sizes: Mapping[str, int], pieces: int) -> list[list[str]]:
    """Divides tensors, in order, into pieces of about equal size, each with at least one tensor.

    Args:
        sizes: number of elements of each tensor, by name.
        pieces: number of pieces.

    Raises:
        ConfigError: there are fewer tensors than pieces.
    """
    if len(sizes) < pieces:
        raise ConfigError(f"{len(sizes)} tensors cannot be cut into {pieces} fragments; use at most {len(sizes)}")
    names, total = list(sizes), sum(sizes.values())
    result: list[list[str]] = []
    seen = 0
    for place, name in enumerate(names):
        left = len(names) - place
        open_pieces = pieces - len(result)
        # A piece begins at its share of all elements, or if only one tensor is left for each remaining piece.
        if not result or (open_pieces and (seen * pieces >= len(result) * total or left <= open_pieces)):
            result.append([])
        result[-1].append(name)
        seen += sizes[name]
    return result


class DiLoCo(LockstepStrategy):
    """Averages the change of many local steps and applies it with an outer optimizer (Douillard et al., 2023).

    After `sync_every` local steps the pseudo-gradient is averaged between the peers: the model after the last global
    step minus the present model. The outer optimizer steps from there, and all peers go on from the result
    (arXiv:2311.08105). With `fragments` the model is averaged in pieces at staggered steps, each piece once in
    `sync_every` steps, which lowers the peak traffic. With `delay` training goes on during a round (Streaming DiLoCo,
    Douillard et al., 2025, arXiv:2501.18512).

    A peer that is alone makes the outer step with its own pseudo-gradient. If a round fails or lacks a part of the
    result, nothing changes, and the next round sends all local steps since the last global step. A peer that has missed
    a global step takes over the state of another peer and adds its own local steps.

    The outer state (the model after the last global step, and the outer optimizer's state) is kept on the CPU.

    With `compression="top_k"` a peer sends only the largest elements of each block of 64 × 64, about a thousandth of
    the bytes of float32 (SparseLoCo, arXiv:2508.15706). What it has not sent yet, its *residual*, is added to its next
    change: `residual = decay * residual + change - sent`. See docs/how-to/slow-link.md.

    Args:
        sync_every: local steps between two rounds of the same fragment; or a time, such as "120s": then all peers
            average at the multiples of it by the clock of the run, with the steps that each has made. Fragments come at
            equal distances between.
        outer: function that makes the outer optimizer from a list of parameters. By default it is that of the paper,
            SGD with `lr=0.7` and Nesterov momentum of 0.9; with `top_k` it is SGD with `lr=1` without momentum, whose
            part the residual takes.
        fragments: number of pieces, of about equal size, without splitting a tensor. A number of steps in `sync_every`
            must be a multiple.
        delay: local steps between the start of a fragment's round and its result; 0 waits for the round.
        alpha: weight of the local model when a result arrives: `alpha * local + (1 - alpha) * global`. With `top_k` it
            is the weight of the local steps made meanwhile: `global + alpha * (local - local at the round's start)`,
            since what was not sent stays in the residual.
        compression: see `Strategy`; `"top_k"` sends the largest elements only.
        density: with `top_k`, the share of the elements of each block that is sent; the same at all peers.
        bits: with `top_k`, bits of each value that is sent, 2, 4 or 8; the same at all peers.
        decay: with `top_k`, factor of the residual in each round, from 0 to 1; this peer's own. 1 forgets nothing.
        mean_over: with `top_k`, whether an element is averaged over the `"senders"` that sent it, or over `"all"`
            members of the round, of which the others count as 0; the same at all peers.
        error_feedback: see `Strategy`; `top_k` has its own.
        max_norm: limit for the gradients of each local step and for the pseudo-gradient, see `Strategy`.

    Raises:
        ConfigError: an argument is invalid.
    """

    averages_changes = True

    def __init__(
        self,
        sync_every: int | str,
        *,
        outer: OuterFactory | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        compression: CompressionType | str | None = None,
        density: float = 1 / 64,
        bits: int = 2,
        decay: float = 0.95,
        mean_over: MeanOver | str = MeanOver.SENDERS,
        error_feedback: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(compression=compression, error_feedback=error_feedback, max_norm=max_norm)
        if type(fragments) is not int or fragments < 1:
            raise ConfigError(f"fragments must be a whole number, at least 1, not {fragments!r}")
        self._schedule: Schedule = make_schedule(sync_every, fragments)
        check_whole_number("delay", delay, 0)
        if isinstance(sync_every, int) and delay >= sync_every // fragments:
            raise ConfigError(
                f"a fragment's round begins every {sync_every // fragments} steps; delay must be less, not {delay}"
            )
        if not (is_finite(alpha) and 0 <= alpha <= 1):
            raise ConfigError(f"alpha must be from 0 to 1, not {alpha!r}")
        self.top_k = self._top_k({"density": density, "bits": bits, "decay": decay, "mean_over": mean_over})
        self.decay = decay
        outer = outer or (PLAIN if self.top_k else NESTEROV)
        if not callable(outer):
            raise ConfigError(
                "outer must make an optimizer of a list of parameters, such as "
                f"functools.partial(torch.optim.SGD, lr=0.7), not {outer!r:.200}"
            )
        self.sync_every, self.fragments, self.delay, self.alpha = sync_every, fragments, delay, alpha
        self._make_outer = outer
        self._fragments: list[Fragment] = []
        self._pending: PendingRound | None = None
        self._pending_history = History()  # when the pending round began
        self._loaded = False  # whether the anchors come from a state; local steps may follow them
        self._discarded = False  # whether another peer's result may include the local steps since the last global step

    def __repr__(self) -> str:
        defaults = {"fragments": (self.fragments, 1), "delay": (self.delay, 0), "alpha": (self.alpha, 0.0)}
        options = "".join(f", {name}={value}" for name, (value, default) in defaults.items() if value != default)
        sparse = "" if self.top_k is None else f", density={self.top_k.density:g}, bits={self.top_k.bits}"
        if self.top_k is not None:
            sparse += f", decay={self.decay:g}, mean_over={self.top_k.mean_over.value}"
        return f"DiLoCo(sync_every={self.sync_every!r}{options}{self._options()}{sparse})"

    def _top_k(self, options: Mapping[str, Any]) -> TopK | None:
        """The options of `top_k`, checked; None with another compression.

        Raises:
            ConfigError: one of them is invalid, or was given with another compression.
        """
        changed = [name for name, value in options.items() if value != TOP_K_DEFAULTS[name]]
        if self.compression is not CompressionType.TOP_K:
            if changed:
                raise ConfigError(
                    f"{changed[0]} is an option of compression='top_k'; set that, or leave {changed[0]} out"
                )
            return None
        decay = options["decay"]
        if not (is_finite(decay) and 0 <= decay <= 1):
            raise ConfigError(f"decay, the factor of the residual in each round, must be from 0 to 1, not {decay!r}")
        if self.error_feedback:
            raise ConfigError(
                "error_feedback does not go with compression='top_k', which has its own: what was not sent is kept in "
                "the residual; leave error_feedback out, and set decay instead"
            )
        return TopK(options["density"], options["bits"], one_of(MeanOver, options["mean_over"], "mean_over"))

    @property
    def samples(self) -> float:
        """Local steps since the last round."""
        return self._schedule.steps

    @property
    def terms(self) -> Mapping[str, str]:
        """Also the options of `top_k`."""
        if self.top_k is None:
            return super().terms
        chosen = {"density": f"{self.top_k.density:g}", "bits": str(self.top_k.bits)}
        return {**super().terms, **chosen, "mean_over": self.top_k.mean_over.value}

    def start(self, training: StrategyContext) -> None:
        """Divides the model into fragments and creates an outer optimizer for each."""
        self._fragments = []  # `start` may have failed for another averager
        pieces = cut({name: parameter.numel() for name, parameter in training.trained.items()}, self.fragments)
        for number, names in enumerate(pieces):
            parameters = {name: training.parameters[name] for name in names}
            anchors = {
                name: torch.nn.Parameter(parameter.detach().to("cpu", full_precision(parameter), copy=True))
                for name, parameter in parameters.items()
            }
            changes = {name: torch.zeros_like(anchor, requires_grad=False) for name, anchor in anchors.items()}
            # The last fragment's round also averages the buffers. It uses copies, since a result that arrived between
            # forward and backward would change what autograd has saved.
            buffers = training.buffers if number == len(pieces) - 1 else {}
            averages = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
            topic = training.topic(
                f"pseudogradient-{number}of{len(pieces)}",
                changes | averages,
                adopt=Adopt.WHOLE,
                compression=self.compression,
                top_k=self.top_k,
                decay=self.decay,
                error_feedback=self.error_feedback,
            )
            outer = self._make_outer(list(anchors.values()))
            _check_outer(outer, anchors.values())
            copied = [(buffer, averages[name]) for name, buffer in buffers.items()]
            self._fragments.append(Fragment(number, parameters, anchors, changes, topic, outer, copied))
        training.hyperparameters.optimizers["outer "] = self._fragments[0].outer
        self._owns, self._leads = training.site.owns, training.site.leads
        if self.top_k is not None:
            _check_tied({fragment.number: fragment.parameters for fragment in self._fragments})
        if self.top_k is not None and self._leads and _has_momentum(self._fragments[0].outer):
            logger.warning(
                "the outer optimizer has momentum, whose part the residual of top_k takes already: a change that is "
                "sent late would be amplified again. Leave outer out, or use SGD without momentum"
            )

    def joined(self, training: StrategyContext) -> None:
        """Starts from the present parameters if no outer state was taken over."""
        if self.history.step == 0 and not self._loaded:
            self._anchor()
        elif self.top_k is not None and not self.attached:
            # A donor's parameters may hold local steps, which the donor sends itself.
            with training.locked(), training.changing_parameters():
                for fragment in self._fragments:
                    fragment.export()
        super().joined(training)

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """One local step; ends a round whose result is due, and begins the next one if that is due.

        The first step starts from the present parameters: they may have been loaded or averaged.
        """
        if training.local_step == self.history.step == 0:
            with training.locked():
                self._anchor()
        loss = training.inner_step(closure, self.max_norm)
        self._count(training)
        if self._pending is not None and self._schedule.steps >= self.delay:
            self._end(training, self._pending)
        if self._pending is None:
            others, is_behind, due = training.site.broadcast_from_leader(lambda: self._look(training))
            if not (is_behind and self.catch_up(training, others)) and due is not None:
                self._begin(training, self._next_fragment, () if due.nobody else others.together, due)
        if self._pending is not None and not self.delay:
            self._end(training, self._pending)
        self._go_on(training, in_round=self._pending is not None)
        return loss

    def _anchor(self) -> None:
        for fragment in self._fragments:
            fragment.anchor()

    def finish(self, training: StrategyContext) -> None:
        """Waits for the round in progress."""
        if self._pending is not None:
            self._end(training, self._pending)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Makes the last outer step of each fragment; drops the local steps of a fragment whose round fails."""
        receipt: Receipt | None = None
        end = training.monotonic() + timeout
        # The fragment that was averaged last may have changed at no peer since.
        is_new = self.samples + self.present_others(training).samples > 0
        for _ in self._fragments if is_new else self._fragments[1:]:
            together, is_left = training.site.broadcast_from_leader(lambda: self._at_the_end(training, partners))
            if is_left:
                break  # an outer step of this peer alone would make its weights differ from the partners'
            self._begin(training, self._next_fragment, together, search_timeout=max(0.0, end - training.monotonic()))
            if self._pending is not None:
                receipt = self._end(training, self._pending)
        with training.replacing(), training.changing_parameters():
            for fragment in self._fragments:
                if fragment.feedback is not None and self._owns:  # not empty if the last round has failed
                    fragment.feedback.keep({name: -steps for name, steps in fragment.local_steps().items()})
                fragment.export()
        if self._feedbacks and self._leads:
            self._tell_unsent()
        if not training.modes.exist:
            return receipt
        # Equal training weights, but the evaluation weights depend on this peer's own iterates as well.
        training.modes.eval()
        topic = training.topic("", training.tensors | training.iterates(), adopt=Adopt.WHOLE, commits=True)
        return self._average_at_the_end(training, topic, end - training.monotonic())

    def _tell_unsent(self) -> None:
        norms = [feedback.unsent() for feedback in self._feedbacks]
        residual, change = (math.hypot(*of_fragments) for of_fragments in zip(*norms, strict=True))
        logger.info(
            "top_k: this peer ends with changes that it never sent; they are dropped. Their norm is %.3g, that of its "
            "last change %.3g%s",
            *(residual, change, f" ({residual / change:.1f} times as much)" if change else ""),
        )

    def _at_the_end(self, training: StrategyContext, partners: Collection[str]) -> tuple[tuple[str, ...], bool]:
        """The peers to make the last outer step with, and whether there are none although partners are left."""
        announcements = training.announcements.of_others()
        together = self.others(training, announcements).together
        return together, not together and not announcements.keys().isdisjoint(partners)

    def _look(self, training: StrategyContext) -> tuple[Others, bool, Due | None]:
        """The other peers, whether this one is behind or may be, and its next round, if it is due."""
        others = self.present_others(training, wait=False)
        due = self._due(training, self._next_fragment.topic, self.history.phase)
        return others, bool(others.ahead) or self._downloads.busy, due

    def _begin(
        self,
        training: StrategyContext,
        fragment: Fragment,
        together: tuple[str, ...],
        due: Due = IMMEDIATELY,
        search_timeout: float | None = None,
    ) -> None:
        """Begins the round of a fragment; a peer that can average with nobody makes its outer step at once."""
        fragment.measure(keep=self.top_k is not None and self.alpha > 0 and bool(together))
        if self.max_norm is not None:
            training.clip(fragment.changes.values(), self.max_norm)
        self._schedule.restart()
        if not together:
            self._step(training, fragment, None)
            return
        if due.moment:
            self._tell(training, due.moment)
        self._pending_history = self.history
        weight = training.weight_of(fragment.topic)
        options: RoundOptions = {
            "phase": self.history.phase,
            "weight": weight,
            "gather": {"samples": weight},
            "expected_peers": self._at_moment(self._expected_peers(training, together), due.moment),
            "drift": training.fingerprint(self._anchors, self.history.phase, self.history.step),
        }
        if search_timeout is not None:
            options["search_timeout"] = search_timeout
        self._pending = training.begin(fragment.topic, after=due.after, **options)

    def _end(self, training: StrategyContext, pending: PendingRound) -> Receipt:
        try:
            receipt = training.receipt_of(pending)
        except BaseException:
            if pending.done():  # a KeyboardInterrupt ends the wait, not the round
                self._pending = None
                with suppress(AveragingError):  # `on_round` has raised, so the result is not applied
                    self._discarded = bool(pending.result().group_id)
            raise
        self._pending = None
        if self.history != self._pending_history:
            return receipt  # a checkpoint was loaded meanwhile, so the result belongs to other parameters
        if receipt.averaged:
            self._step(training, self._next_fragment, receipt)
        else:
            self._discarded = bool(receipt.group_id)
        return receipt

    def _step(self, training: StrategyContext, fragment: Fragment, receipt: Receipt | None) -> None:
        with training.replacing(), training.changing_parameters():
            fragment.step(self.alpha)
            if fragment.feedback is not None and receipt is not None:
                fragment.feedback.applied()
            elif fragment.feedback is not None:
                fragment.feedback.applied_alone()
            self._advance(training, receipt, training.weight_of(fragment.topic))
        if receipt is None:
            training.samples.averaged[fragment.topic.schema.topic] = training.samples.made
        self._discarded = False
        self.announce(training)

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        """Adds the local steps that no result includes to the state, if it follows this peer's own.

        So it is with the residual: it stays, less what the last round has sent if the state may include that.
        """
        before, discarded = self.history, self._discarded
        own = [fragment.steps_to_keep(discarded=discarded) for fragment in self._fragments]
        samples = training.samples.made, dict(training.samples.averaged)
        super()._take_over(training, fetch)
        follows = self.history.includes(before)  # or they belong to other parameters, perhaps false ones
        if follows and not discarded:
            training.samples.made, training.samples.averaged = samples
        if follows:
            with training.locked(), training.changing_parameters():
                for fragment, steps in zip(self._fragments, own, strict=True):
                    fragment.rebase(steps)
        for feedback in self._feedbacks:
            if not follows:
                feedback.reset()
            elif discarded:
                feedback.applied()
        self._discarded = False

    @property
    def _feedbacks(self) -> list[SparseFeedback]:
        return [fragment.feedback for fragment in self._fragments if fragment.feedback is not None]

    @property
    def _anchors(self) -> dict[str, torch.Tensor]:
        """The model after the last global step by name, equal at all peers."""
        return {name: anchor for fragment in self._fragments for name, anchor in fragment.anchors.items()}

    @property
    def _next_fragment(self) -> Fragment:
        return self._fragments[self.history.step % len(self._fragments)]

    def state(self) -> ExtraState:
        """The model after the last global step, and the state of the outer optimizers."""
        tensors: dict[str, torch.Tensor] = {}
        outer = []
        for fragment in self._fragments:
            tensors |= {f"anchor/{name}": anchor.detach() for name, anchor in fragment.anchors.items()}
            state_tensors, packed = pack_optimizer(fragment.outer, fragment.progress, f"outer{fragment.number}")
            tensors |= state_tensors
            outer.append(packed)
        return ExtraState(tensors, {"outer": outer, "since": self._schedule.steps})

    def parameter_of(self, name: str) -> str | None:
        """The parameter of an anchor, or of a tensor in the state of an outer optimizer."""
        kind, _, rest = name.partition("/")
        if kind == "anchor":
            return rest
        number, _, key = rest.partition("/")
        names = list(self._fragments[int(kind.removeprefix("outer"))].anchors)
        return names[int(number)] if number.isdigit() and key != "step" else None

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads an outer state; the hyperparameters of the outer optimizers do not change."""
        super().load(tensors, user)
        since = count_in(user, "since")
        outer = user.get("outer")
        if not isinstance(outer, list) or len(outer) != len(self._fragments):
            raise StateError(f"its model is not divided into {len(self._fragments)} fragments, as this peer's is")
        own = [name for fragment in self._fragments for name in fragment.anchors]
        anchors_in_state = under_own_names(tensors, "anchor/", own)
        new_anchors = [
            {name: take_tensor(anchors_in_state, name, anchor) for name, anchor in fragment.anchors.items()}
            for fragment in self._fragments
        ]
        with ExitStack() as all_or_none:
            for fragment, packed in zip(self._fragments, outer, strict=True):
                all_or_none.enter_context(restored_on_error(fragment.outer))
                load_optimizer(fragment.outer, tensors, packed, fragment.progress, f"outer{fragment.number}")
        with torch.no_grad():
            for fragment, anchors in zip(self._fragments, new_anchors, strict=True):
                for name, anchor in anchors.items():
                    fragment.anchors[name].copy_(anchor)
        self._schedule.steps, self._loaded = since, True
        self._discarded = False

    def own_state(self) -> Mapping[str, torch.Tensor]:
        """The residuals of `top_k`: what this peer has not sent yet."""
        if not self._owns:
            return {}
        return {name: tensor for feedback in self._feedbacks for name, tensor in feedback.state().items()}

    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads residuals, which belong to the anchors of the same checkpoint."""
        anchors = self._anchors
        named = under_own_names(tensors, "", list(anchors))
        fitting = {
            name: take_tensor(named, name, torch.empty_like(anchor, dtype=torch.float32, device="meta"))
            for name, anchor in anchors.items()
            if name in named
        }
        if not all(torch.isfinite(tensor).all() for tensor in fitting.values()):
            raise StateError("what it has not sent yet (the residual of top_k) holds NaN or infinity")
        if tensors and self._leads and self.top_k is None:
            logger.warning(
                "the checkpoint holds changes that were not sent yet (the residual of top_k); without "
                "compression='top_k' they are dropped"
            )
        for feedback in self._feedbacks if self._owns else ():
            feedback.load(fitting)


def _check_tied(fragments: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Checks that parameters which share memory are cut into the same blocks, so that what is sent of them is the same.

    Raises:
        TensorError: two of them differ in their shapes, or in the fragment.
    """
    names = [(number, name) for number, parameters in fragments.items() for name in parameters]
    tensors = [fragments[number][name] for number, name in names]
    tied = {names[place]: tensors[place] for place in sharing_memory(tensors)}
    kinds = {key: (key[0], tensor.data_ptr(), tensor.shape, tensor.stride()) for key, tensor in tied.items()}
    count = Counter(kinds.values())
    for (_, name), kind in kinds.items():
        if count[kind] < 2:
            raise TensorError(
                f"parameter {name!r} shares its memory with another one of another shape or fragment, of which top_k "
                "would send other elements; use another compression, or give the optimizer one of them"
            )


def _has_momentum(outer: torch.optim.Optimizer) -> bool:
    return any(group.get("momentum") for group in outer.param_groups)


def _check_outer(outer: Any, given: Iterable[torch.nn.Parameter]) -> None:
    """Checks that an outer optimizer has exactly the given parameters: with the model's own nothing would be learnt.

    Raises:
        ConfigError: it has others, or requires a closure.
    """
    groups = getattr(outer, "param_groups", [])
    if {id(parameter) for group in groups for parameter in group["params"]} != {id(parameter) for parameter in given}:
        raise ConfigError(
            "outer must make an optimizer of all the parameters that it is called with, not of the model's own; "
            f"its {type(outer).__name__} has others. Use outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
    if needs_closure(outer):
        raise ConfigError(f"outer makes a {type(outer).__name__}, whose step requires a closure; use another optimizer")
