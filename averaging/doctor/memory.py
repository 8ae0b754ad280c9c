"""Whether a peer's tensors fit into the memory of this machine. What they are is reckoned in `averaging.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from averaging.common import size
from averaging.doctor.findings import Finding, failure, ok, warning

AT_THE_MODEL = frozenset({"parameters", "gradients", "statistics of the optimizer"})
"""What is where the model is, on a GPU if it is there (`averaging.plan.memory_of_peer`); all else is on the CPU."""

HEADROOM = 0.8
"""Part of the free memory above which activations, data loaders and the process itself may not fit any more."""

REMEDY = "use fewer bytes (share_state=False, another strategy or dtype, a divided model), or more memory"


def memory_of_file(nbytes: int, *, share_state: bool) -> dict[str, int]:
    """Bytes that `averaging peer FILE` holds, by what they hold.

    Args:
        nbytes: Bytes of the tensors in the file.
        share_state: Whether newcomers may download them.
    """
    held = {"tensors of the file": nbytes, "results of a round": nbytes}
    return held | ({"copy for newcomers": nbytes} if share_state else {})


def check_memory(held: Mapping[str, int], free: int | None, free_on_gpu: int | None) -> list[Finding]:
    """Compares what a peer will hold with what is free.

    Args:
        held: Bytes by what they hold.
        free: Free bytes of this machine; None if unknown.
        free_on_gpu: Free bytes of the GPU on which the model will be; None for a model on the CPU.
    """
    on_gpu = 0 if free_on_gpu is None else sum(bytes for what, bytes in held.items() if what in AT_THE_MODEL)
    findings = [_compare("memory", "this machine", sum(held.values()) - on_gpu, free, held, without=bool(on_gpu))]
    if on_gpu and free_on_gpu is not None:
        at_the_model = {what: bytes for what, bytes in held.items() if what in AT_THE_MODEL}
        findings.append(_compare("gpu-memory", "the GPU", on_gpu, free_on_gpu, at_the_model))
    return findings


def _compare(
    check: str, where: str, needed: int, free: int | None, held: Mapping[str, int], *, without: bool = False
) -> Finding:
    parts = ", ".join(f"{what} {size(n)}" for what, n in held.items() if not (without and what in AT_THE_MODEL))
    text = f"{size(needed)} are needed ({parts})"
    if free is None:
        return warning(check, f"{text}; how much {where} has free is not known", "compare by hand")
    text += f", and {where} has {size(free)} free"
    if needed > free:
        return failure(check, text, REMEDY)
    if needed > HEADROOM * free:
        return warning(check, f"{text}, without activations and the process itself", REMEDY)
    return ok(check, text)


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a new process may use: what the system has available, within the limit of this container."""
    found: list[int] = []
    with suppress(OSError, StopIteration, ValueError):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # no limit is the text "max"
        limit = int((cgroup / "memory.max").read_text())
        found.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    return min(found, default=None)


def free_memory_of_gpu() -> int | None:
    """Free bytes of the GPU with most of them; None if there is none."""
    if not torch.cuda.is_available():
        return None
    return max(int(torch.cuda.mem_get_info(device)[0]) for device in range(torch.cuda.device_count()))
