"""DiLoCo and LocalSGD in one process without the library: to choose learning rates and to isolate bugs.

`python -m benchmarks.convergence.tuning --sync-every 50 --lr 2e-3 4e-3 --outer-lr 0.7` trains with each pair of
rates and prints the loss on the held-out text for choosing, with `--judge` also that on the text of the final
evaluation.
`--sync-every 0` is one process with the joined batch; `--outer-lr 1 --momentum 0` is LocalSGD.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence.train import Case, Recipe, Text, backward, held_out, new_model, new_optimizer
from benchmarks.output import write
from examples.language_model import LanguageModel, read, windows


@dataclass(frozen=True, slots=True)
class Outer:
    """The settings of the outer optimizer.

    Attributes:
        sync_every: local steps between two outer steps; 0 is one process with the joined batch.
        lr: learning rate of the outer optimizer, SGD with Nesterov momentum.
        momentum: its momentum; 0 is plain SGD.
        begin: number of first steps after each of which the replicas are averaged, so that they begin as one process.
    """

    sync_every: int
    lr: float
    momentum: float
    begin: int = 0


def train(recipe: Recipe, lr: float, outer: Outer, alike: bool) -> LanguageModel:
    """Trains the peers' replicas, on the whole text if `alike`, else each on its part; returns the final model."""
    peers = recipe.peers if outer.sync_every else 1
    texts = [Text(recipe, part) for part in range(recipe.peers)]
    if alike:
        whole = torch.cat([text.bytes for text in texts])
        for text in texts:
            text.bytes = whole
    models = [new_model(recipe) for _ in range(peers)]
    optimizers = [new_optimizer(recipe, Case("", lr), model) for model in models]
    joined = recipe.peers * recipe.batch
    schedules = [LambdaLR(inner, lambda step: recipe.lr_factor(step * joined)) for inner in optimizers]
    anchor = torch.nn.Parameter(parameters_to_vector(models[0].parameters()).detach().clone())
    optimizer = torch.optim.SGD([anchor], lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    for step in range(1, recipe.steps + 1):
        batches = [text.draw() for text in texts]
        shares = batches if outer.sync_every else [torch.cat(batches)]
        for model, inner, schedule, share in zip(models, optimizers, schedules, shares, strict=True):
            backward(model, inner, share)
            inner.step()
            schedule.step()
        if outer.sync_every and (step <= outer.begin or step % outer.sync_every == 0 or step == recipe.steps):
            mean = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).mean(0)
            if step <= outer.begin:
                anchor.data.copy_(mean)
            else:
                anchor.grad = anchor.detach() - mean
                optimizer.step()
            for model in models:
                vector_to_parameters(anchor.detach().clone(), model.parameters())
    return models[0]


def evaluate(recipe: Recipe, model: LanguageModel, text: torch.Tensor) -> float:
    """Returns the held-out loss in bits per byte."""
    return model.evaluate(windows(text, 2048, recipe.size.context, torch.Generator().manual_seed(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--outer-lr", type=float, nargs="+", default=[0.7])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--begin", type=int, default=0, help="first steps, averaged after each")
    parser.add_argument("--batch", type=int, default=Recipe().batch)
    parser.add_argument("--alike", action="store_true", help="all peers draw from the whole text")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument(
        "--output", type=Path, help="JSON to which the runs are added, such as docs/design/results/tuning.json"
    )
    options = parser.parse_args()
    if min(options.steps, options.batch) < 1 or options.sync_every < 0:
        parser.error("there must be at least 1 step and a batch of 1, and --sync-every of 0 or more")
    torch.set_num_threads(1)
    recipe = Recipe(steps=options.steps, batch=options.batch, seed=options.seed)
    texts = [read(files) for files in held_out()[: 2 if options.judge else 1]]
    for lr, outer_lr in itertools.product(options.lr, options.outer_lr):
        outer = Outer(options.sync_every, outer_lr, options.momentum, options.begin)
        model = train(recipe, lr, outer, options.alike)
        losses = [evaluate(recipe, model, text) for text in texts]
        print(lr, outer, *(f"{loss:.4f}" for loss in losses), flush=True)
        run = {
            "steps": recipe.steps,
            "seed": recipe.seed,
            "lr": lr,
            "sync_every": outer.sync_every,
            "outer_lr": outer_lr,
        }
        run |= {"batch": recipe.batch, "begin": outer.begin, "alike": options.alike}
        run |= {"momentum": outer.momentum, "chosen": losses[0], "judged": losses[1] if options.judge else None}
        if options.output is not None:
            runs = json.loads(options.output.read_text()) if options.output.exists() else []
            write(options.output, [*runs, run])


if __name__ == "__main__":
    main()
