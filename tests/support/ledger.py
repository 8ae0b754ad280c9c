"""What must hold in a run whatever happens to it, checked from receipts and states as they are reported.

Pure: no process, clock or socket. A simulation and a run of real processes report the same values, and every method
raises a `LedgerError` that names the evidence. A `life` is one start of a peer's process: 1, 2, … after each kill.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from averaging.receipts import Receipt


class LedgerError(AssertionError):
    """Two reports contradict each other, or one contradicts what every run promises."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of `opt.step` of `GradientAveraging` made of the samples of a peer.

    Attributes:
        batch: samples of this call.
        pending: samples gathered for the next global step after the call (`opt.status.samples`).
        step: number of global steps after the call.
        version: names the history of these steps; equal at peers that have made the same ones (`History.phase`).
        receipts: the receipts of the rounds in the call.
    """

    batch: int
    pending: float
    step: int
    version: str
    receipts: tuple[Receipt, ...] = ()


@dataclass(slots=True)
class _Life:
    """What is known of one life of a peer."""

    round: int = 0
    state_version: int = -1
    pending: float = 0.0
    step: int = -1
    version: str = ""
    held: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Samples:
    """Where the samples that peers have trained are, added up over all of them.

    Attributes:
        trained: in all calls of `opt.step`.
        averaged: in rounds whose result their peer has adopted.
        alone: in global steps that a peer has made alone.
        superseded: dropped because their peer took over a state that is further. Perhaps that state holds them.
    """

    trained: float = 0.0
    averaged: float = 0.0
    alone: float = 0.0
    superseded: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Compares everything that is reported on a run.

    Attributes:
        rounds: averaged rounds, counted at each member.
        groups: groups of which at least one member has reported an average.
        samples: where the samples of `GradientAveraging` are.
    """

    rounds: int = 0
    groups: set[bytes] = field(default_factory=set)
    samples: Samples = field(default_factory=Samples)
    _contents: dict[tuple[str, Hashable], tuple[object, str]] = field(default_factory=dict)
    _lives: dict[tuple[str, int], _Life] = field(default_factory=dict)
    _numbers: dict[tuple[str, str, int], float] = field(default_factory=dict)

    # Contents and versions

    def content(self, kind: str, version: Hashable, content: Hashable, where: str) -> None:
        """Notes what a version holds: no version has two contents. An empty one is ignored.

        Args:
            kind: what has versions, such as `weights`.
            version: equal for what must be equal.
            content: a digest, or the values themselves.
            where: who says so, for the message.
        """
        if content in ("", None):
            return
        known, first = self._contents.setdefault((kind, version), (content, where))
        if known != content:
            raise LedgerError(f"{kind} {_short(version)} is {content} at {where}, but {known} at {first}")

    def never_back(self, kind: str, peer: str, life: int, number: float) -> None:
        """Notes a number that never goes back in one life of a peer."""
        before = self._numbers.setdefault((kind, peer, life), number)
        if number < before:
            raise LedgerError(f"{kind} of {peer} (life {life}) went back from {before:g} to {number:g}")
        self._numbers[kind, peer, life] = number

    # Rounds

    def receipt(self, peer: str, life: int, receipt: Receipt) -> None:
        """Checks a receipt against all earlier ones: of the same life in their order, and of the same group."""
        own = self._lives.setdefault((peer, life), _Life())
        where = f"{peer} (life {life}, round {receipt.round})"
        if receipt.round <= own.round:
            raise LedgerError(f"{where} comes after round {own.round}")
        own.round = receipt.round
        self.never_back("state version", peer, life, receipt.state_version)
        if not receipt.averaged:
            if not receipt.reason and receipt.outcome != "cancelled":
                raise LedgerError(f"{where} ended as {receipt.outcome} without a reason")
            return
        self.rounds += 1
        self._group(where, peer, receipt)

    def _group(self, where: str, peer: str, receipt: Receipt) -> None:
        """The members of a group agree on who they are, on what they weigh, and on the average."""
        group = receipt.group_id
        self.groups.add(group)
        if not group or peer not in receipt.members or len(set(receipt.members)) != len(receipt.members):
            raise LedgerError(f"{where} averaged in group {group.hex()} of {receipt.members}")
        self.content("members of group", group, (receipt.topic, receipt.members), where)
        self.content("average of group", group, receipt.digest, where)
        self.content("state in group", group, receipt.state, where)
        for account in receipt.accounts:
            self.content("shard average of group", (group, account.endpoint), account.digest, where)
            self.content("weight in group", (group, account.endpoint), (account.weight, account.mode), where)
        for member, user in receipt.gathered.items():
            if isinstance(user, Mapping) and "samples" in user:
                self.content("samples in group", (group, member), ("samples", user["samples"]), where)

    def average(self, receipt: Receipt, content: Hashable, where: str) -> None:
        """Notes what a member holds after an averaged round, unless elements were kept: who agrees holds the same."""
        if receipt.averaged and not receipt.kept_local:
            self.content("result of group", receipt.group_id, content, where)

    # Global steps and samples

    def begins(self, peer: str, life: int, step: int, version: str) -> None:
        """Notes the state with which a life begins: from a peer, from a checkpoint, or its own."""
        self._lives[peer, life] = _Life(step=step, version=version)

    def step(self, peer: str, life: int, made: Step) -> None:
        """Checks one `opt.step` of `GradientAveraging`: no sample is lost or counted twice, no version comes again.

        After a partition a peer may take over a history of fewer steps, if more members stand behind it.
        The receipts of the call need not be given to `receipt` besides.
        """
        where = f"{peer} (life {life}, step {made.step})"
        own = self._lives.setdefault((peer, life), _Life(step=made.step, version=made.version))
        for receipt in made.receipts:
            self.receipt(peer, life, receipt)
        before, gathered = own.version, own.pending + made.batch
        self.samples.trained += made.batch
        averaged = [one for one in made.receipts if one.averaged and one.topic.startswith("gradients")]
        self._weigh(where, peer, gathered, averaged)
        if made.version != before and made.version in own.held:
            raise LedgerError(f"{where} went back from {before} to {made.version}, which it had left")
        own.held |= {before, made.version}
        if made.version == before:
            if averaged:
                raise LedgerError(f"{where} averaged in {averaged[0].group_id.hex()[:8]} and made no step")
            if made.pending != gathered:
                raise LedgerError(f"{where} has {made.pending:g} samples in version {before} after {gathered:g}")
        else:
            self._moved(where, own, made, gathered, averaged)
        own.pending, own.step, own.version = made.pending, made.step, made.version

    def _moved(self, where: str, own: _Life, made: Step, gathered: float, averaged: list[Receipt]) -> None:
        """After a step of its own, or with the state of another peer, a peer has no samples of former parameters."""
        if made.pending:
            raise LedgerError(
                f"{where} has {made.pending:g} samples in version {made.version} that it gathered in {own.version}: "
                "they would count twice"
            )
        if len(averaged) > 1:
            raise LedgerError(f"{where} averaged {gathered:g} samples in {len(averaged)} rounds")
        if averaged:
            if made.step != own.step + 1:
                raise LedgerError(f"{where} made one step from step {own.step}")
            self.content("version after group", averaged[0].group_id, made.version, where)
            self.samples.averaged += gathered
        elif made.step == own.step + 1 and not self._known(made.version):
            self.samples.alone += gathered
        else:
            self.samples.superseded += gathered

    def _known(self, version: str) -> bool:
        return ("parameters of version", version) in self._contents

    def _weigh(self, where: str, peer: str, gathered: float, averaged: Iterable[Receipt]) -> None:
        for receipt in averaged:
            user = receipt.gathered.get(peer)
            said = user.get("samples", 0.0) if isinstance(user, Mapping) else 0.0
            if said != gathered:
                raise LedgerError(f"{where} put {said} samples into its round, of {gathered:g} that it had gathered")

    def parameters(self, version: str, content: Hashable, where: str) -> None:
        """Notes the parameters of a version of a run whose peers make global steps together."""
        self.content("parameters of version", version, content, where)

    def ends(self, living: Iterable[tuple[str, int]]) -> None:
        """Checks at the end that the peers that live, given with their lives, hold the same version."""
        versions = {one: self._lives[one].version for one in living}
        if len(set(versions.values())) > 1:
            raise LedgerError(f"the peers that live end with different versions: {versions}")


def recovery_limit(usual_round: float, deadline: float) -> float:
    """Seconds within which all living peers have averaged again after a failure: two usual rounds and a deadline.

    Args:
        usual_round: from the call of `average` or `step` of the last peer to the receipt, in seconds, without failures.
        deadline: the longest wait for a silent peer, in seconds: of a declaration for a group, or of a member.
    """
    return 2 * usual_round + deadline


def check_recovery(what: str, seconds: float, usual_round: float, deadline: float) -> None:
    """Checks how long it took until all living peers had averaged again."""
    limit = recovery_limit(usual_round, deadline)
    if seconds > limit:
        raise LedgerError(
            f"after {what} it took {seconds:.2f} s until all averaged again, more than {limit:.2f} s = "
            f"2 × a usual round of {usual_round:.2f} s + a deadline of {deadline:.2f} s"
        )


def _short(version: Any) -> str:
    if isinstance(version, bytes):
        return version.hex()[:8]
    if isinstance(version, tuple):
        return " ".join(map(_short, version))
    return str(version)
