"""The optimizers and schedulers of the tests: all of torch, and those of other packages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes
import prodigyopt
import schedulefree
import torch
from torch.optim import lr_scheduler
from transformers.optimization import Adafactor

Make = Callable[[Any], torch.optim.Optimizer]
Schedule = Callable[..., lr_scheduler.LRScheduler]

CLOSURES = ("LBFGS", "AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure")
"""Classes whose step requires a closure."""

MATRICES = ("Muon",)
"""Classes that train matrices only."""

SPARSE = ("SparseAdam",)
"""Classes that need sparse gradients."""

WITHOUT_SCHEDULERS = ("schedulefree.ScheduleFreeWrapper", "transformers.Adafactor")
"""Names of optimizers that torch's schedulers refuse: the first is not of torch's class, the second has no `lr`."""

NOT_IN_BFLOAT16 = ("SGD, fused", "SparseAdam", "bitsandbytes.PytorchLARS")
"""Names of optimizers whose step changes nothing then, or fails."""


def _of_torch() -> dict[str, Make]:
    """Every optimizer of the installed torch with its defaults, also those that this list does not know."""
    named = ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    return {
        name: kind
        for name, kind in named
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


TORCH = _of_torch() | {
    "LBFGS": partial(torch.optim.LBFGS, max_iter=3),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, momentum, weight decay": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD, maximize, foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "AdamW, a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
    "Adagrad, decay": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "RMSprop, centered": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "Rprop, large": partial(torch.optim.Rprop, lr=0.1),
}

OTHERS: dict[str, Make] = {
    "schedulefree.SGDScheduleFree": partial(schedulefree.SGDScheduleFree, lr=0.1, warmup_steps=3),
    "schedulefree.AdamWScheduleFree": partial(schedulefree.AdamWScheduleFree, lr=0.1, warmup_steps=9, r=0.5),
    "schedulefree.RAdamScheduleFree": partial(schedulefree.RAdamScheduleFree, lr=0.1),
    "schedulefree.AdamWScheduleFreeReference": partial(schedulefree.AdamWScheduleFreeReference, lr=0.1),
    "schedulefree.AdamWScheduleFreePaper": partial(schedulefree.AdamWScheduleFreePaper, lr=0.1),
    "schedulefree.SGDScheduleFreeReference": partial(schedulefree.SGDScheduleFreeReference, lr=0.1),
    "schedulefree.AdamWScheduleFreeClosure": partial(schedulefree.AdamWScheduleFreeClosure, lr=0.1),
    "schedulefree.RAdamScheduleFreeClosure": partial(schedulefree.RAdamScheduleFreeClosure, lr=0.1),
    "schedulefree.SGDScheduleFreeClosure": partial(schedulefree.SGDScheduleFreeClosure, lr=0.1),
    "schedulefree.ScheduleFreeWrapper": lambda params: schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(params, lr=0.1, momentum=0.9)  # others find its `z` where they expect no state yet
    ),
    "prodigyopt.Prodigy": prodigyopt.Prodigy,
    "prodigyopt.Prodigy, d0": partial(prodigyopt.Prodigy, d0=0.01, use_bias_correction=True, safeguard_warmup=True),
    "transformers.Adafactor": Adafactor,
    "transformers.Adafactor, lr": partial(Adafactor, lr=0.1, relative_step=False, beta1=0.9),
    **{
        f"bitsandbytes.{name}": partial(getattr(bitsandbytes.optim, name), lr=0.1, **options)
        for name, options in {
            "Adam": {},
            "AdamW": {},
            "Adam8bit": {},
            "AdamW8bit": {},
            "AdEMAMix": {},
            "AdEMAMix8bit": {},
            "Adagrad": {},
            "Adagrad8bit": {},
            "LAMB": {},
            "LAMB8bit": {},
            "LARS": {"momentum": 0.9},
            "LARS8bit": {"momentum": 0.9},
            "Lion": {},
            "Lion8bit": {},
            "PytorchLARS": {"momentum": 0.9},
            "RMSprop": {},
            "RMSprop8bit": {},
            "SGD": {"momentum": 0.9},
            "SGD8bit": {"momentum": 0.9},
        }.items()
    },
}

SCHEDULERS: dict[str, Schedule] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 4]),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=4),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=7),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=9),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}
