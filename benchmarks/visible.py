"""What `compression="visible"` saves in reinforcement learning, beside DiLoCo in float32, and what reward it costs.

A byte-level transformer is trained on the Python standard library's sources, then peers teach it to write more letters:
each continues other texts, `GROUP` times each, is rewarded with the share of letters among the bytes that it wrote, and
steps AdamW by the rewards less their mean in the group. Weights are float32, and all passes see them in bfloat16. The
peers are in one process on a network in memory; bytes are those of the receipts.

    python -m benchmarks.visible --lrs 1e-6 1e-5       seeds 0, 1 and 2, both ways; into visible.json
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from averaging import DecentralizedAverager, DiLoCo, Receipt
from averaging.testing import MemoryDiscovery, MemoryNetwork, MemoryRegistry
from benchmarks.convergence.train import Recipe, held_out, start_model, texts
from benchmarks.runner import machine, make_folder, make_parser, write
from benchmarks.workers import say
from examples.language_model import LanguageModel, windows

RECIPE = Recipe()
PEERS, EVERY, ROUNDS = 4, 8, 25
PROMPTS, GROUP, PROMPT, WRITTEN = 4, 8, 16, 12
JUDGED = 1024
"""Texts that are continued to judge a model."""

PATIENCE = 300.0

Way = Mapping[str, Any]
WAYS: Mapping[str, Way] = {"float32": {}, "visible": {"compression": "visible"}}
OUTERS = {
    "plain": partial(torch.optim.SGD, lr=1.0),
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}


def logits_of(model: LanguageModel, text: torch.Tensor) -> torch.Tensor:
    """What the model predicts with its weights in bfloat16; gradients are those of the float32 weights."""
    seen = {name: parameter.bfloat16().float() for name, parameter in model.named_parameters()}
    logits: torch.Tensor = functional_call(model, seen, (text,))
    return logits


@torch.no_grad()
def write_on(model: LanguageModel, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Continues each prompt [count, length] by sampled bytes."""
    text = prompts
    for _ in range(WRITTEN):
        chances = logits_of(model, text)[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return text


def rewards_of(text: torch.Tensor) -> torch.Tensor:
    """The share of letters among the bytes that were written."""
    lower = text[:, PROMPT:] | 0x20
    return ((lower >= ord("a")) & (lower <= ord("z"))).float().mean(1)


def policy_loss(model: LanguageModel, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The policy gradient of one batch, with the advantage of each text in the group of its prompt (GRPO)."""
    text = write_on(model, prompts.repeat_interleave(GROUP, 0), generator)
    rewards = rewards_of(text).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    chosen = logits_of(model, text[:, :-1])[:, PROMPT - 1 :].log_softmax(-1).gather(2, text[:, PROMPT:, None])
    return -(chosen.squeeze(2).mean(1) * advantages.view(-1)).mean()


def judge(model: LanguageModel) -> float:
    """The mean reward on held-out texts, with the same random numbers for all models."""
    prompts = held_out(RECIPE.size.context)[:JUDGED, :PROMPT]
    return float(rewards_of(write_on(model, prompts, torch.Generator().manual_seed(0))).mean())


class Run:
    """The peers of one run, each of which trains in a thread."""

    def __init__(self, start: LanguageModel, way: Way, lr: float, seed: int) -> None:
        self._way, self._lr, self._seed = way, lr, seed
        self._network = MemoryNetwork(random.Random(seed))
        self._registry = MemoryRegistry(rng=random.Random(seed))
        self.models = [LanguageModel(RECIPE.size) for _ in range(PEERS)]
        for model in self.models:
            model.load_state_dict(start.state_dict())
        self.receipts: list[list[Receipt]] = [[] for _ in range(PEERS)]
        self._turn = threading.Lock()  # more threads than cores would only slow each other down

    def train(self, peer: int) -> None:
        model = self.models[peer]
        generator = torch.Generator().manual_seed(1000 * self._seed + peer)
        with DecentralizedAverager(
            torch.optim.AdamW(model.parameters(), lr=self._lr, betas=(0.9, 0.95), weight_decay=0.0),
            model=model,
            run_id="visible",
            strategy=DiLoCo(EVERY, **self._way),
            transport=self._network.transport(f"peer-{peer}:1"),
            discovery=lambda endpoint, transport: MemoryDiscovery(self._registry),
            group_size=PEERS,
            group_wait=PATIENCE,
            on_round=self.receipts[peer].append,
        ) as opt:
            if not opt.wait_for_peers(PEERS, PATIENCE):
                raise RuntimeError("not all peers have come")
            for _ in range(EVERY * ROUNDS):
                with self._turn:
                    opt.zero_grad()
                    prompts = windows(texts(PEERS)[peer], PROMPTS, PROMPT, generator)[:, :PROMPT]
                    policy_loss(model, prompts, generator).backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()

    def result(self) -> dict[str, Any]:
        with ThreadPoolExecutor(PEERS) as pool:
            list(pool.map(self.train, range(PEERS)))
        complete = [len(each.members) == PEERS and each.averaged for each in self.receipts[0]]
        if complete != [True] * ROUNDS:
            raise RuntimeError(f"not all peers averaged in all rounds: {self.receipts[0]}")
        first, *others = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in self.models]
        if not all(torch.equal(first, other) for other in others):
            raise RuntimeError("the peers do not hold the same model in the end")
        rounds = zip(*self.receipts, strict=True)
        sent = [sum(each.bytes_sent for each in peers) / PEERS for peers in rounds]
        return {"reward": judge(self.models[0]), "sent": statistics.mean(sent), "by_round": sent}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5], help="learning rates of AdamW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the start and of the training")
    parser.add_argument("--outer", choices=OUTERS, default="plain", help="outer optimizer of both ways (plain)")
    options = parser.parse_args()
    make_folder(parser, options.output)
    torch.set_num_threads(1)
    file: Path = options.output / "visible.json"
    found: dict[str, Any] = {**machine(), "peers": PEERS, "every": EVERY, "rounds": ROUNDS, "runs": []}
    for lr in options.lrs:
        for seed in options.seeds:
            start = start_model(RECIPE, "trained", seed, options.output, say)
            for name, way in WAYS.items():
                result = {"way": name, "outer": options.outer, "lr": lr, "seed": seed, "before": judge(start)}
                found["runs"].append(result | Run(start, {"outer": OUTERS[options.outer], **way}, lr, seed).result())
                write(file, found)
                one = found["runs"][-1]
                say(f"{name}, lr {lr:g}, seed {seed}: reward {one['before']:.4f} -> {one['reward']:.4f}, "
                    f"{one['sent'] / 1024:.1f} KiB sent in a round")  # fmt: skip


if __name__ == "__main__":
    main()
