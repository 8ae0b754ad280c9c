"""The same training of two peers on the CPU and on a device, whose arithmetic is exact so that both can be compared.

The gradients are given, and the inner optimizer is SGD with a power of two as its learning rate: then a step rounds
once, however the device computes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from averaging import DiLoCo, LocalSGD, Strategy
from averaging.protocol import CompressionType
from tests.support.site_worker import PatientGradients
from tests.support.training import Run

SAMPLES = 4
STEPS = 8

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "gradients": lambda: PatientGradients(2 * SAMPLES),
    "gradients, clipped": lambda: PatientGradients(2 * SAMPLES, max_norm=1e6),
    "gradients, error feedback": lambda: PatientGradients(2 * SAMPLES, compression="fp16", error_feedback=True),
    "local": lambda: LocalSGD(2),
    "local, overlap": lambda: LocalSGD(8, overlap=True),
    "local, statistics": lambda: LocalSGD(2, statistics=True),
    "diloco": lambda: DiLoCo(2),
    "diloco, delay": lambda: DiLoCo(4, delay=2),
    "diloco, alpha": lambda: DiLoCo(4, delay=1, alpha=0.5),
    "diloco, fragments": lambda: DiLoCo(4, fragments=2, delay=1),
    "diloco, quorum": lambda: DiLoCo(4, quorum=2, delay=1),
    "changes": lambda: LocalSGD.of_changes(2),
}
"""All of them, with their options, as far as what travels is exact."""

CODES = [code.name.lower() for code in CompressionType if code and not code.is_sparse]

LOSSY: dict[str, dict[str, Any]] = {
    "top_k": {"compression": "top_k", "density": 1.0, "bits": 8},
    **{code: {"compression": code} for code in CODES},
}

Move = Callable[[torch.nn.Module], torch.nn.Module]
Put = Callable[[torch.Tensor], torch.Tensor]


def model_with_buffers() -> torch.nn.Module:
    """Parameters of several shapes, one of them not contiguous, one in bfloat16, and buffers of both kinds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.BatchNorm1d(65), torch.nn.Linear(65, 3, bias=False))
    model.register_parameter("turned", torch.nn.Parameter(torch.randn(7, 5).t()))
    model.register_parameter("short", torch.nn.Parameter(torch.randn(40).to(torch.bfloat16)))
    return model


def trained(
    strategy: Callable[[], Strategy], move: Move = lambda model: model, put: Put = lambda tensor: tensor
) -> list[float]:
    """The weights of two peers after the same steps; both have the same at the end.

    Args:
        strategy: makes that of each peer.
        move: moves a model to the device.
        put: moves a tensor there.
    """
    run = Run()
    try:
        for _ in range(2):
            run.add(strategy(), partial(torch.optim.SGD, lr=2**-5, momentum=0.5), move(model_with_buffers()))
        run.meet()

        def train(number: int) -> None:
            model, opt = run.models[number], run.averagers[number]
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(100 * number + step)
                for parameter in model.parameters():
                    gradient = torch.randint(-16, 17, parameter.shape, generator=generator) / 16
                    parameter.grad = put(gradient.to(parameter.dtype))
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        buffer.fill_(1.0 + (step + number) / 16)
                opt.step(batch_size=SAMPLES)
            opt.finish(60.0)

        run.each(train)
        for averager in run.averagers:
            receipt = averager.last_receipt
            assert receipt is not None
            assert receipt.averaged, receipt
        held = [[*model.parameters(), *model.buffers()] for model in run.models]
        weights = [torch.cat([one.detach().cpu().float().flatten() for one in tensors]).tolist() for tensors in held]
        assert weights[0] == weights[1]
        return weights[0]
    finally:
        run.close()
