"""What the demo knows of its processes, and what it concludes at the end. Nothing here waits or prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SMOOTHED = 20
"""Steps over which training losses are averaged for display: a single batch's loss says little."""


@dataclass(slots=True)
class Member:
    """One process: a peer, or the model that is trained alone.

    Attributes:
        name: for people.
        part: which part of the text it trains on, from 1.
        alone: whether it averages with nobody.
        newcomer: whether it came after the kill.
        state: what it is doing, in a word or two.
        endpoint: of a peer; empty until it is known.
        first_step: where it began: 0, or the step of the state that it took over.
        step: steps made so far, `first_step` included.
        training: loss of each step on its own text, in bits per byte, by step.
        held_out: loss on held-out text after each average, in bits per byte, by step.
        rounds: averages it took part in.
        seconds: how long the last of them took.
        members: endpoints of the last round's members.
        killed_at: the step it had made when it was killed; None if it was not.
        result: loss on held-out text at the end, in bits per byte.
        sha256: of its parameters at the end.
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
        """Takes in what the process told; returns a line for the viewer if it is worth one."""
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
        """It was killed just now."""
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
        steps: that each makes.
        members: the peers and the model trained alone.
    """

    steps: int
    members: list[Member] = field(default_factory=list)

    @property
    def peers(self) -> list[Member]:
        """Those that average, killed ones included."""
        return [member for member in self.members if not member.alone]

    @property
    def living(self) -> list[Member]:
        """The peers that were not killed."""
        return [peer for peer in self.peers if peer.killed_at is None]

    @property
    def alone(self) -> Member:
        """The model that is trained alone."""
        return next(member for member in self.members if member.alone)

    def explain(self, line: str, speaker: Member) -> str:
        """Adds to each endpoint in a line whose it is, but for the speaker's own."""
        for peer in self.peers:
            if peer.endpoint and peer is not speaker:
                line = re.sub(rf"{re.escape(peer.endpoint)}\b", f"{peer.name} ({peer.endpoint})", line)
        return line

    def names(self, endpoints: Sequence[str]) -> list[str]:
        """What the peers of these endpoints are called, sorted; the endpoint itself of one that is not known."""
        known = {peer.endpoint: peer.name for peer in self.peers}
        return sorted(known.get(endpoint, endpoint) for endpoint in endpoints)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured, and what follows.

    Attributes:
        averaged: loss of the averaged model on held-out text in bits per byte; of the worst peer, if they differ.
        alone: of the model that was trained alone.
        same_bytes: whether all living peers ended with the same parameters, byte for byte.
    """

    averaged: float
    alone: float
    same_bytes: bool

    @property
    def good(self) -> bool:
        """Whether averaging kept its promise."""
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
    """Concludes from the results.

    Raises:
        ValueError: somebody has no result.
    """
    results = [peer.result for peer in record.living]
    alone = record.alone.result
    if alone is None or not results or None in results:
        raise ValueError("a process ended without telling its result")
    digests = {peer.sha256 for peer in record.living}
    return Verdict(max(result for result in results if result is not None), alone, len(digests) == 1)
