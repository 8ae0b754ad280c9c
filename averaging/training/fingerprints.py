"""What a peer compares with the members of its rounds: a fingerprint of its tensors, and its hyperparameters."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import xxhash

from averaging.protocol import ENTRY_BYTES, MAX_NAMES, MAX_TEXT, Fingerprint, runs
from averaging.receipts import Drift, DriftCheck, DriftKind, Receipt
from averaging.training.optimizer_state import GroupProgress, arguments_of
from averaging.training.site import Site

logger = logging.getLogger("averaging.training")

SAMPLE_BYTES = 16 << 20
"""Bytes of a model that are digested in one fingerprint. If it has more, a part of each tensor is, and the parts move
on with each fingerprint. docs/operate/reliability.md has the time that it takes."""

LEAST_BYTES = 4096
"""Bytes of a tensor that are digested at least."""

SKETCHED = 1024
"""Elements of a tensor from which its sketch is computed."""

NO_HYPERPARAMETERS = frozenset({"self", "params", "foreach", "fused", "capturable", "differentiable"})
"""Arguments of optimizers that are no hyperparameters, or choose how a step is computed, not what."""

DRIFT_ADVICE = (
    "give all peers the same hyperparameters and scheduler, and write no parameters at one peer alone; a peer that is "
    "started again takes over the state of the run"
)

ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""By dtype, the relative difference of tensors up to which unequal machines may have caused it by rounding."""

ROUNDING_OF_OTHERS = 1e-5


def tolerance_of(tensors: Sequence[torch.Tensor]) -> float:
    return max((ROUNDING.get(tensor.dtype, ROUNDING_OF_OTHERS) for tensor in tensors), default=0.0)


def fingerprint_of(tensors: Sequence[torch.Tensor], moment: str, number: int, since: int = 0) -> Fingerprint:
    """The fingerprint of part `number` of tensors on any device, equal at all peers whose tensors are equal."""
    pieces = _on_cpu(_windows(tensors, number))
    digests = [xxhash.xxh3_64_digest(piece.view(np.uint8).data) for piece in pieces]
    entries = (xxhash.xxh3_64_digest(b"".join(digests[run.start : run.stop])) for run in runs(len(digests)))
    sketches = [_sketch(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    return Fingerprint(
        moment,
        xxhash.xxh3_64_hexdigest(b"".join(digests)),
        b"".join(entry[:ENTRY_BYTES] for entry in entries),
        sum(sketches) / max(1, len(sketches)),
        since,
    )


def _windows(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Part `number` of each tensor, 1-D; all of it if all tensors together are small enough."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    windows = []
    for tensor in tensors:
        flat, size = tensor.detach().reshape(-1), tensor.element_size()
        if nbytes > SAMPLE_BYTES:
            length = max(LEAST_BYTES, flat.numel() * size * SAMPLE_BYTES // nbytes) // size
            start = number % max(1, -(-flat.numel() // length)) * length
            flat = flat[start : start + length]
        windows.append(flat)
    return windows


def _on_cpu(windows: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The bytes of 1-D tensors. Those on a device come in one copy for each dtype, since each copy waits for it."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, window in enumerate(windows):
        by_kind[window.device, window.dtype].append(place)
    pieces = list(windows)
    for (device, _), places in by_kind.items():
        if device.type != "cpu":
            together = torch.cat([windows[place] for place in places]).cpu()
            for place, piece in zip(
                places, torch.split(together, [windows[place].numel() for place in places]), strict=True
            ):
                pieces[place] = piece
    return [
        piece.contiguous().view(torch.uint8).numpy() if piece.numel() else np.empty(0, np.uint8) for piece in pieces
    ]


_SIGNS = np.where(np.random.default_rng(0).random(SKETCHED) < 0.5, -1.0, 1.0)


def _sketch(piece: np.ndarray, tensor: torch.Tensor) -> float:
    """A number that changes by about the relative change of the tensor: a projection of its direction, and its norm."""
    if not piece.size:
        return 0.0
    values = torch.from_numpy(piece).view(tensor.dtype)
    values = values[:: max(1, -(-values.numel() // SKETCHED))]
    sampled = (values if tensor.dtype is torch.float64 else values.float()).numpy().astype(np.float64)
    norm = float(np.sqrt(sampled @ sampled))
    if not (norm > 0 and np.isfinite(norm)):
        return 0.0
    return float(sampled @ _SIGNS[: sampled.size]) / norm + float(np.log(norm))


class DriftMonitor:
    """Compares a peer with the members of its rounds, and warns once of each difference.

    Hyperparameters are the arguments of the optimizers' constructors that the parameter groups hold. So neither what a
    scheduler or the user keeps in a group, nor what the optimizer counts there, is among them. A tensor on a device is
    left out, since reading it would stop that device.
    """

    def __init__(self, site: Site, optimizer: torch.optim.Optimizer, progress: GroupProgress) -> None:
        self._site, self._progress = site, progress
        self.optimizers = {"": optimizer}  # by the prefix of their names; a strategy adds its own
        self.since = 0  # 0 if this peer began with its own parameters; else 1 + its local step at its last takeover
        self._logged: set[Drift] = set()
        self._first = self._hyperparameters()
        self._scheduled: set[str] = set()  # those that were changed since

    def _hyperparameters(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for prefix, optimizer in self.optimizers.items():
            names = (
                arguments_of(type(optimizer).__mro__) - NO_HYPERPARAMETERS - (set() if prefix else self._progress.keys)
            )
            groups = optimizer.param_groups
            texts[f"{prefix}optimizer"] = type(optimizer).__name__[:MAX_TEXT]
            for name in [name for name in groups[0] if name in names]:
                column = [_text(group.get(name)) for group in groups]
                if all(column):
                    texts[f"{prefix}{name}"[:MAX_TEXT]] = _short(column[0] if len(set(column)) == 1 else str(column))
        return dict(list(texts.items())[:MAX_NAMES])

    def comparison(self, check: DriftCheck | None, local_step: int) -> DriftCheck:
        """What is compared in a round: what the strategy compares, and the present hyperparameters."""
        check = check or DriftCheck(Fingerprint())
        values, step = self._hyperparameters(), local_step if check.step is None else check.step
        self._scheduled |= {name for name, text in values.items() if self._first.setdefault(name, text) != text}
        scheduled = tuple(sorted(self._scheduled & values.keys()))
        own = replace(check.own, since=self.since, step=step, hyperparameters=values, scheduled=scheduled)
        return replace(check, own=own)

    def log(self, receipt: Receipt) -> None:
        """Logs the differences between the members of a group that should be equal."""
        if receipt.averaged and not receipt.drift:
            self._logged.clear()
        for drift in receipt.drift:
            same = replace(drift, value="", expected="", size=None)  # values may change with each step
            if self._site.leads and same not in self._logged:
                rounding = drift.kind is DriftKind.ROUNDING
                whose = " (this peer)" if drift.endpoint == receipt.endpoint else ""
                advice = "" if rounding else f"; {DRIFT_ADVICE}"
                logger.log(logging.INFO if rounding else logging.WARNING, "drift: %s%s%s", drift, whose, advice)
            self._logged.add(same)


def _text(value: object) -> str:
    """A value as text, with six digits of each number, since machines round differently; empty if it cannot be read."""
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.device.type == "cpu" and value.numel() == 1 else ""
    if isinstance(value, list | tuple):
        items = [_text(item) for item in value]
        return f"({', '.join(items)})" if all(items) else ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.6g}"
    return str(value) if value is None or isinstance(value, bool | str) else ""


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:40]}…{xxhash.xxh3_64_hexdigest(text.encode())}"
