"""The library's peers in one process: each trains in a thread of its own, and they average over gRPC on loopback."""

import math
import statistics
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Receipt, Strategy
from benchmarks.convergence.cases import Case, steps_in
from benchmarks.convergence.train import Curve, Recipe, Say, Trained, adamw, batches
from examples.language_model import LanguageModel
from examples.muon import MuonAndAdamW

PATIENCE = 120.0
"""Seconds for which peers wait for each other."""


def train_with_library(
    recipe: Recipe, case: Case, model: LanguageModel, steps: int, peers: int, seed: int, say: Say
) -> Trained:
    """Trains one replica for each peer with the library's strategy for the case.

    Raises:
        RuntimeError: the peers did not average in each round, or are not equal in the end.
    """
    run = Run(recipe, case, model, steps, peers)
    with ThreadPoolExecutor(peers, "trains") as threads:
        working = [threads.submit(run.train, part, seed, say if part == 0 else lambda _: None) for part in range(peers)]
        for thread in working:
            thread.result()
    return run.end()


def strategy_of(case: Case, peers: int, speed: float) -> Strategy:
    """The library's strategy for a case, at a peer of this speed."""
    if case.moments is not None:
        return LocalSGD(case.every, statistics=True, statistics_every=case.moments)
    options: dict[str, Any] = {"fragments": case.fragments, "delay": case.delay, "alpha": case.alpha}
    if case.quorum:
        options["quorum"] = peers - 1
    if case.codec == "int8":
        options |= {"compression": "int8", "error_feedback": True}
    elif case.codec == "top_k":
        options |= {"compression": "top_k", "density": 1 / case.keeps, "bits": case.bits, "decay": case.decay}
    lr, momentum = case.outer
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    every = case.every if case.quorum else max(1, round(case.every * speed))
    return DiLoCo(every, outer=outer, **options)


def optimizer_of(case: Case, model: LanguageModel) -> torch.optim.Optimizer:
    """The inner optimizer with the case's learning rates: AdamW, or Muon for the matrices and AdamW for the rest."""
    if case.muon is None:
        optimizer = adamw(list(model.parameters()))
        optimizer.param_groups[0]["lr"] = case.lr
        return optimizer
    both = MuonAndAdamW(model, case.lr)
    both.param_groups[0] |= {"lr": case.lr * case.muon, "adjust_lr_fn": None}
    return both


class Run:
    """The peers of one cell, which make each step together.

    Args:
        model: the model that all begin with.
        steps: steps of each peer, if all are equally fast.
    """

    def __init__(self, recipe: Recipe, case: Case, model: LanguageModel, steps: int, peers: int) -> None:
        self._recipe, self._case, self._peers = recipe, case, peers
        self._speeds, self._ticks = case.speeds(peers), case.ticks(steps, peers)
        self._models = [LanguageModel(recipe.size) for _ in range(peers)]
        for replica in self._models:
            replica.load_state_dict(model.state_dict())
        self._first: Future[str] = Future()  # endpoint of the peer through which the others join
        self._receipts: list[list[Receipt]] = [[] for _ in range(peers)]
        self._parts: dict[str, int] = {}  # of the text, by the endpoint of the peer
        self._curve = Curve(recipe, self._ticks)
        self._tick = self._samples = 0
        # One peer computes at a time: more threads than cores would only slow each other down.
        self._turn = threading.Lock()
        self._together = threading.Barrier(peers, self._evaluate)

    def train(self, part: int, seed: int, say: Say) -> None:
        """Trains one peer; all threads fail if one does."""
        try:
            self._train(part, seed, say)
        except BaseException:
            self._together.abort()
            raise

    def _train(self, part: int, seed: int, say: Say) -> None:
        recipe, model = self._recipe, self._models[part]
        with self._averager(part) as opt:
            if part == 0:
                self._first.set_result(opt.endpoint)
            self._parts[opt.endpoint] = part
            if not opt.wait_for_peers(self._peers, PATIENCE):
                raise RuntimeError(f"only {len(opt.peers)} of {self._peers} peers have come")
            text = batches(recipe, self._peers, part, seed)
            for tick in range(self._ticks):
                if steps_in(tick, self._speeds[part]):
                    with self._turn:
                        opt.zero_grad()
                        model.loss(next(text)).backward()  # type: ignore[no-untyped-call]
                        self._samples += recipe.batch
                    opt.step(batch_size=recipe.batch)
                self._together.wait(PATIENCE)
                if (tick + 1) % 100 == 0:
                    say(f"step {tick + 1} of {self._ticks}")
            if self._case.fragments > 1 or self._case.last_speed != 1 or self._ticks % max(1, self._case.every):
                finish = opt.finish(PATIENCE)
                if finish.receipt is not None and finish.receipt not in self._receipts[part]:
                    self._receipts[part].append(finish.receipt)

    def _lr_factor(self, part: int, step: int) -> float:
        """Factor of the learning rate in a local step: that of the fast peers at the same time."""
        tick = math.ceil((step + 1) / self._speeds[part] - 1e-9) - 1
        return self._recipe.lr_factor(tick, self._ticks)

    def _averager(self, part: int) -> DecentralizedAverager:
        model = self._models[part]
        optimizer = optimizer_of(self._case, model)

        def clip(*_: object) -> None:
            clip_grad_norm_(model.parameters(), self._recipe.max_norm)

        optimizer.register_step_pre_hook(clip)
        return DecentralizedAverager(
            optimizer,
            model=model,
            run_id="convergence",
            strategy=strategy_of(self._case, self._peers, self._speeds[part]),
            weight="samples" if self._case.last_speed != 1 else 1.0,
            listen="127.0.0.1:0",
            join=[self._first.result(PATIENCE)] if part else [],
            group_size=self._peers,
            group_wait=PATIENCE,
            round_timeout=PATIENCE,
            stall_timeout=PATIENCE,
            scheduler=lambda inner: LambdaLR(inner, partial(self._lr_factor, part)),
            on_round=self._receipts[part].append,
        )

    def _evaluate(self) -> None:
        """Called by one thread when all have made a step."""
        self._tick += 1
        with torch.no_grad():
            self._curve.note(self._models, self._tick - 1, self._tick)

    def end(self) -> Trained:
        """The result, after all threads have ended."""
        receipts = self._receipts[0]
        incomplete = [
            each for each in receipts if not each.averaged or each.dropped or len(each.members) != self._peers
        ]
        if incomplete and not self._case.delay and not self._case.quorum:
            raise RuntimeError(f"not all peers averaged: {incomplete[0]}")
        first, *others = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in self._models]
        if not all(torch.equal(first, other) for other in others):
            raise RuntimeError("the peers do not hold the same model in the end")
        trained = self._curve.end(self._models)
        rounds = [receipt for receipt in receipts if not receipt.topic.startswith("statistics")]
        trained.rounds, trained.incomplete = len(rounds), len(incomplete)
        trained.orders = [[self._parts[name] for name in receipt.members] for receipt in rounds]
        trained.samples = self._samples
        trained.sent = statistics.mean(sum(receipt.bytes_sent for receipt in peer) for peer in self._receipts)
        return trained
