"""The demo's record of its processes, and the verdict at the end. Nothing here waits or prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SMOOTHED = 20
"""Steps over which training losses are averaged for display, because the loss of a single batch is noisy."""


@dataclass(slots=True)
class Member:
    """One process: a peer, or the model that is trained alone.

    Attributes:
        name: display name.
        part: part of the text on which it trains, from 1.
        alone: whether it trains without averaging.
        newcomer: whether it joined after the kill.
        state: what it is doing, as short text.
        endpoint: endpoint of a peer; empty until it is known.
        first_step: first step: 0, or the step of the downloaded state.
        step: steps made so far, including `first_step`.
        training: loss of each step on its own text, in bits per byte, by step.
        held_out: loss on held-out text after each average, in bits per byte, by step.
        rounds: number of averages in which it took part.
        seconds: duration of the last one.
        members: endpoints of the last round's members.
        killed_at: step at which it was killed; None if it was not.
        result: final loss on held-out text, in bits per byte.
        sha256: digest of its final parameters.
    """

    name: str
    part: int
    alone: bool = False
    newcomer: bool = False
    state: str = "starting"
    endpoint: str = ""
    first_step: int = 0
    step: int = 0
    training: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    members: tuple[str, ...] = ()
    killed_at: int | None = None
    result: float | None = None
    sha256: str = ""

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Processes an event of the process; returns a line to display, if any."""
        if self.killed_at is not None:
            return None  # a line that was still in the pipe
        match event:
            case {"event": "ready", "step": step, **more}:
                self.first_step = self.step = step
                self.endpoint = more.get("endpoint", "")
                self.state = "waiting"
                if not self.endpoint:
                    return "begins"
                notes = "".join(f"; {note}" for note in more["notes"])
                return f"listens on {self.endpoint}{notes}; begins at step {step}"
            case {"event": "found", "peers": peers}:
                return f"has found {len(peers) - 1} other peers"
            case {"event": "step", "step": step, "loss": loss}:
                self.state, self.step, self.training[step] = "training", step, loss
            case {"event": "held_out", "step": step, "loss": loss}:
                self.held_out[step] = loss
            case {"event": "round", "outcome": "averaged", **more}:
                self.rounds += 1
                self.members, self.seconds = tuple(more["members"]), more["seconds"]
                if more["dropped"]:
                    return f"lost {', '.join(more['dropped'])} in a round"
            case {"event": "round", "reason": reason}:
                return f"a round failed: {reason}"
            case {"event": "finishing"}:
                self.state = "finishing"
            case {"event": "done", "loss": loss, "sha256": sha256}:
                self.state, self.result, self.sha256 = "done", loss, sha256
        return None

    def killed(self) -> None:
        """Records that the process was killed now."""
        self.state, self.killed_at = "KILLED", self.step

    @property
    def recent_loss(self) -> float | None:
        """Training loss over the last steps, in bits per byte; None before the first."""
        last = list(self.training.values())[-SMOOTHED:]
        return sum(last) / len(last) if last else None

    @property
    def recent_held_out(self) -> float | None:
        """Loss on held-out text after the last average, or at the end; None before the first."""
        return self.result if self.result is not None else next(reversed(self.held_out.values()), None)


@dataclass(slots=True)
class Record:
    """All processes, in the order of their start.

    Attributes:
        steps: number of steps of each process.
        members: the peers and the model trained alone.
    """

    steps: int
    members: list[Member] = field(default_factory=list)

    @property
    def peers(self) -> list[Member]:
        """The peers, including killed ones."""
        return [member for member in self.members if not member.alone]

    @property
    def living(self) -> list[Member]:
        """The peers that were not killed."""
        return [peer for peer in self.peers if peer.killed_at is None]

    @property
    def alone(self) -> Member:
        """The process that trains alone."""
        return next(member for member in self.members if member.alone)

    def explain(self, line: str, speaker: Member) -> str:
        """Adds the name to each endpoint in a line, except for the peer's own."""
        for peer in self.peers:
            if peer.endpoint and peer is not speaker:
                line = re.sub(rf"{re.escape(peer.endpoint)}\b", f"{peer.name} ({peer.endpoint})", line)
        return line

    def names(self, endpoints: Sequence[str]) -> list[str]:
        """Returns the names of the peers with these endpoints, sorted; the endpoint itself if it is unknown."""
        known = {peer.endpoint: peer.name for peer in self.peers}
        return sorted(known.get(endpoint, endpoint) for endpoint in endpoints)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The measured results and the verdict.

    Attributes:
        averaged: loss of the averaged model on held-out text in bits per byte; of the worst peer, if they differ.
        alone: loss of the model that was trained alone.
        same_bytes: whether all living peers ended with the same parameters, byte for byte.
    """

    averaged: float
    alone: float
    same_bytes: bool

    @property
    def good(self) -> bool:
        """Whether averaging was better and consistent."""
        return self.same_bytes and self.averaged < self.alone

    def __str__(self) -> str:
        measured = f"{self.averaged:.3f} against {self.alone:.3f} bits per byte on held-out text"
        if self.averaged < self.alone:
            return f"The averaged model is better than the one trained alone: {measured}, {self._less}."
        return f"The averaged model is NOT better than the one trained alone: {measured}."

    @property
    def _less(self) -> str:
        return f"{(1 - self.averaged / self.alone) * 100:.1f} % less"


def judge(record: Record) -> Verdict:
    """Computes the verdict.

    Raises:
        ValueError: a process has no result.
    """
    results = [peer.result for peer in record.living]
    alone = record.alone.result
    if alone is None or not results or None in results:
        raise ValueError("a process ended without a result")
    digests = {peer.sha256 for peer in record.living}
    return Verdict(max(result for result in results if result is not None), alone, len(digests) == 1)
