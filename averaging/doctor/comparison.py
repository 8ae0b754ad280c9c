"""Findings from what another peer has answered, compared with what is expected here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from averaging.common import counted, duration, is_placeholder, parse_address, size, spelled, without_wrappers
from averaging.doctor.dial_back import DialOutcome
from averaging.doctor.findings import Finding, failure, ok, warning
from averaging.errors import printable
from averaging.tensors import Schema, TensorSpec, first_difference

CLOCK_TOLERANCE = 3.0
"""Seconds by which the clocks of two peers may differ (docs/reference/protocol.md)."""

MAX_VALUE = 100
"""Characters of a value of another peer that are shown."""

STRATEGIES_OWN = "compression"
"""The option that a strategy may set otherwise than the peer does."""


def compare_runs(ours: str | None, theirs: str, seed: str) -> Finding:
    """The finding about the run of another peer; `ours` is None if the user has given none."""
    theirs = printable(theirs, MAX_VALUE)
    if ours is None:
        remedy = f"give it as {spelled('run_id')} if it is the run that you mean"
        return warning("run", f"the peer belongs to run {theirs!r}", remedy, seed)
    if theirs == ours:
        return ok("run", f"the peer belongs to run {theirs!r}, as this one", seed)
    text = f"another run: the peer belongs to run {theirs!r}, not to {ours!r}"
    return failure("run", text, "give both peers the same run id, or join a peer of the other run", seed)


def compare_software(ours: str, theirs: str, seed: str) -> Finding:
    """The finding about the software of another peer."""
    theirs = printable(theirs, MAX_VALUE)
    if theirs == ours:
        return ok("software", f"{theirs}, as here", seed)
    return warning("software", f"{theirs or 'unknown'} there, {ours} here", "use one release in a run", seed)


def compare_clocks(bound: float, ahead: float, seed: str) -> Finding:
    """The finding about the clock of another peer.

    Args:
        bound: How wrong `ahead` may be, in seconds: half of the round trip.
        ahead: How far the other clock is ahead of this one, in seconds.
        seed: The other peer.
    """
    direction = "ahead of" if ahead >= 0 else "behind"
    text = f"the clock there is {1000 * abs(ahead):.0f} ms {direction} this one (± {1000 * bound:.1f} ms)"
    remedy = "set both clocks, for example with NTP"
    if not abs(ahead) - bound <= CLOCK_TOLERANCE:  # also if it is no number
        text += f"; with more than {CLOCK_TOLERANCE:g} s peers may not find each other"
        return failure("clock-difference", text, remedy, seed)
    if abs(ahead) + bound > CLOCK_TOLERANCE / 2:
        return warning("clock-difference", f"{text}; at most {CLOCK_TOLERANCE:g} s are tolerated", remedy, seed)
    return ok("clock-difference", text, seed)


def compare_options(ours: Mapping[str, str], theirs: Mapping[str, str], seed: str, here: str = "here") -> Finding:
    """The finding about the options that must be the same at all peers of a run; it names those that differ.

    Args:
        ours: The options of this peer, or of another one.
        theirs: Those of the peer that is asked. One that it does not name is of another release.
        seed: The peer that is asked.
        here: Where `ours` are.
    """
    differing = [name for name, value in ours.items() if name in theirs and theirs[name] != value]
    if not differing:
        common = [name for name in ours if name in theirs]
        return ok("options", f"{counted(len(common), 'option')} of a run are the same {here} and there", seed)
    values = [(name, printable(ours[name], MAX_VALUE), printable(theirs[name], MAX_VALUE)) for name in differing]
    text = "; ".join(f"{name} is {our} {here} and {their} there" for name, our, their in values)
    if differing == [STRATEGIES_OWN]:
        return warning("options", text, "it must be the same, unless a strategy with the option wins at both", seed)
    return failure("options", text, f"set {', '.join(map(spelled, differing))} alike at all peers", seed)


KNOWN_STRATEGIES = frozenset({"localsgd", "diloco", "gradientaveraging"})


def compare_strategies(ours: str, theirs: str, seed: str, here: str = "here") -> Finding:
    """The finding about the strategy with which another peer trains.

    Args:
        ours: That of this peer, or of another one, such as `local_sgd` or `LocalSGD`; empty if it is not known.
        theirs: The name of its class at the peer that is asked; empty if that peer does not train.
        seed: The peer that is asked.
        here: Where `ours` is used.
    """
    our, their = (name.replace("_", "").lower() for name in (ours, theirs))
    theirs = printable(theirs, MAX_VALUE)
    if not our or our == their:
        same = f", as {here}" if our else ""
        return ok("strategy", f"the peer trains with {theirs}{same}" if theirs else "the peer does not train", seed)
    if not their:
        return warning(
            "strategy", f"the peer does not train, and {ours} is used {here}", "join a trainer as well", seed
        )
    # A class of the user's own may be one of them under another name.
    kind = failure if {our, their} <= KNOWN_STRATEGIES else warning
    return kind("strategy", f"{ours} {here} and {theirs} there", "use one strategy in a run", seed)


def compare_schemas(ours: Schema | None, theirs: Schema, seed: str, where: str = "") -> Finding:
    """The finding about what another peer averages, with the first difference by name.

    Args:
        ours: What this peer averages, or another one; None if that is not known.
        theirs: What the peer that is asked averages.
        seed: The peer that is asked.
        where: Says where `ours` is averaged if it is not here.
    """
    text = f"{counted(len(theirs.tensors), 'tensor')}, {size(theirs.nbytes)}"
    if ours is None:
        return ok("schema", f"the peer averages {text}; with a FILE they are compared", seed)
    if ours.topic != theirs.topic:
        topics = f"{ours.topic or 'its own tensors'!r} here and {theirs.topic or 'its own tensors'!r} there"
        return warning("schema", f"{where}not compared: a round averages {topics} at this moment", "ask again", seed)
    if is_other_order(ours, theirs):
        text = f"{where}the same {text}, in another order: a file has them by name, a model as its code does"
        return warning("schema", text, "this fits a training script with that model, and not `averaging peer`", seed)
    if difference := difference_by_name(ours, theirs):
        remedy = (
            "all peers of a run average the same in the same way: compare the models, the options of the strategy, "
        )
        remedy += "and the versions of their code"
        return failure("schema", f"{where}{difference}", remedy, seed)
    return ok("schema", f"{where}{text}, the same here and there", seed)


def difference_by_name(ours: Schema, theirs: Schema) -> str | None:
    """The first difference between two schemas, by the names of the tensors if all have some; None without any."""
    here, there = _by_name(ours), _by_name(theirs)
    if here is None or there is None:
        return first_difference(ours, theirs)
    differing = [name for name in dict.fromkeys([*here, *there]) if not _alike(here.get(name), there.get(name))]
    if not differing:
        return first_difference(ours, theirs)
    name, more = differing[0], f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
    if name not in there:
        return f"tensor {name!r} ({here[name]}) is only here{more}"
    if name not in here:
        return f"tensor {name!r} ({there[name]}) is only there{more}"
    return f"tensor {name!r} is {here[name]} here and {there[name]} there{more}"


def is_other_order(ours: Schema, theirs: Schema) -> bool:
    """Whether two schemas differ in the order of their tensors and in nothing else."""
    here, there = _by_name(ours), _by_name(theirs)
    if here is None or there is None or list(here) == list(there) or here.keys() != there.keys():
        return False
    return first_difference(replace(ours, tensors=tuple(here[name] for name in there)), theirs) is None


def _by_name(schema: Schema) -> dict[str, TensorSpec] | None:
    names = without_wrappers(spec.name for spec in schema.tensors)
    if len(set(names)) < len(names) or any(map(is_placeholder, names)):
        return None
    return dict(zip(names, schema.tensors, strict=True))


def _alike(our: TensorSpec | None, their: TensorSpec | None) -> bool:
    if our is None or their is None:
        return False
    return (our.dtype, our.shape, our.compression) == (their.dtype, their.shape, their.compression)


def judge_call_back(outcome: str, reason: str, seconds: float, endpoint: str, seed: str, *, listening: bool) -> Finding:
    """The finding about a connection back.

    Args:
        outcome: A `DialOutcome`, as the peer names it.
        reason: Why, in the words of the peer.
        seconds: Until the connection was open.
        endpoint: HOST:PORT that it was to dial.
        seed: The peer.
        listening: Whether this process listens there.
    """
    check, port = "call-back", endpoint.rpartition(":")[2]
    reason, unreached = printable(reason, 2 * MAX_VALUE), f"the peer cannot reach {endpoint}"
    forward = f"let TCP port {port} in, or forward it to this machine; or use {spelled('mode', 'client')}"
    match outcome:
        case DialOutcome.REACHED:
            return ok(check, f"the peer reaches {endpoint} in {duration(max(0.0, seconds))}", seed)
        case DialOutcome.OTHER if not listening:
            return ok(check, f"the peer reaches {endpoint}, where something listens already", seed)
        case DialOutcome.OTHER:
            text = f"at {endpoint} the peer reaches something else than this machine"
            return failure(check, text, f"correct the forwarding, or {spelled('advertise')}", seed)
        case DialOutcome.REFUSED:
            what = "the connection is refused" if listening else "nothing listens there"
            return failure(check, f"{unreached}: {what}", forward, seed)
        case DialOutcome.SILENT | DialOutcome.UNREACHABLE:
            return failure(check, f"{unreached}: {reason or outcome}", forward, seed)
        case DialOutcome.CERTIFICATE:
            remedy = f"issue a certificate for {parse_address(endpoint)[0]} (averaging ca issue), and give it here"
            return failure(check, f"the peer reaches {endpoint}, but TLS fails there: {reason}", remedy, seed)
        case DialOutcome.NOT_YOURS:
            text = f"not tried, because a peer calls back only the address that calls it: {reason}"
            return warning(check, text, f"try {endpoint} from that machine, for example with `nc -vz`", seed)
    return warning(check, f"the peer answers {printable(outcome, 40)!r}, which is unknown here", "update this", seed)


def judge_nat(outcome: str, endpoint: str, outside: str, seed: str) -> Finding:
    """The finding about a connection back through the NAT behind which this machine is.

    Args:
        outcome: A `DialOutcome` of the connection to `outside`, as the peer names it.
        endpoint: HOST:PORT that this peer would advertise.
        outside: HOST:PORT of the NAT, from whose address the calls of this machine arrive.
        seed: The peer that was asked.
    """
    host, port = outside.rpartition(":")[0], outside.rpartition(":")[2]
    nat = f"calls from here arrive from {host}, so a NAT is between"
    if outcome == DialOutcome.REACHED:
        text = f"{nat}, and port {port} of it leads here, while {endpoint} is another address"
        return failure("call-back", text, f"advertise {outside}, or let the name of {endpoint} lead to it", seed)
    forward = f"forward TCP port {port} of {host} to this machine and advertise {outside}, or use "
    forward += spelled("mode", "client")
    if not outcome:
        text = f"not tried: {nat}, and {endpoint} is another address"
        return warning("call-back", text, f"unless {endpoint} is reached in another way: {forward}", seed)
    if outcome == DialOutcome.OTHER:
        return failure("call-back", f"{nat}, whose port {port} leads to something else", forward, seed)
    return failure("call-back", f"{nat}, which does not let port {port} in ({printable(outcome, 40)})", forward, seed)
