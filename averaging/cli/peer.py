"""`averaging peer`, which averages the tensors of a file with the other peers of a run, and `averaging leave`."""

from __future__ import annotations

import asyncio
import shlex
import signal
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from averaging.cli import options
from averaging.cli.files import Document, NotWrittenError, Output, check_can_be_averaged, read
from averaging.cli.running import (
    CommandError,
    CommandOutput,
    InputError,
    Item,
    Stop,
    Stopped,
    check_address,
    reporting,
    run,
    with_metrics,
)
from averaging.common import (
    CLIENT_PREFIX,
    compute_in_one_thread,
    counted,
    duration,
    is_loopback,
    keep_freed_memory,
    listed,
    parse_address,
    plain,
    size,
)
from averaging.config import NonFinite
from averaging.errors import printable
from averaging.protocol import Mode, ReplyForm
from averaging.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from averaging.config import PeerConfig
    from averaging.control import LeaveStep
    from averaging.discovery.gossip import Waiting
    from averaging.peer import Peer, Topic
    from averaging.rpc import Credentials
    from averaging.seeds import FoundSeeds
    from averaging.tensors import Schema


@click.command("peer", cls=options.PeerCommand)
@click.argument("files", type=options.CheckedPath(), nargs=-1, required=True, metavar="FILE.safetensors...")
@options.peer_options
@options.count("--rounds", "Rounds to do.  [default: 1, or no limit with --serve]", metavar="K")
@options.switch("--serve", "Continue after the rounds: average and share the state until Ctrl+C or SIGTERM.")
@options.path("--output", "OUT.safetensors", "File for the average, written after all rounds; with --serve after each.")
@options.switch("--overwrite", "Let --output replace a file that exists, FILE included.")
@options.option("--only", "Average only tensors with such names, as '*.lora_*'; repeatable.", "PATTERN", multiple=True)
@options.option("--exclude", "Keep tensors with such names as they are; repeatable.", "PATTERN", multiple=True)
@options.option("--weight", "Weight of FILE in the average.", "W", default=1.0, type=options.NOT_NEGATIVE)
@options.count("--retries", "Retries after failed rounds in a row.", 2, least=0)
@options.option("--interval", "Pause after each round.", "SECONDS", default=0.0, type=options.NOT_NEGATIVE)
@options.output_options
def peer_command(files: Sequence[Path], output: Path | None, *, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Averages the tensors of FILE.safetensors with the other peers of a run.

    Every peer brings a file with the same tensors. They are sorted by name, because the format keeps no order; names,
    dtypes and shapes must be the same everywhere, apart from the prefixes of wrappers (module., _orig_mod.). After the
    rounds every member holds the weighted mean, which is written with the names, dtypes and metadata of FILE.
    Tensors of integers, such as counters, stay as they are, and those that --only or --exclude leaves out.

    \b
    Two peers; the first prints the exact command that joins it:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --output a-mean.safetensors
      averaging peer b.safetensors --run-id demo --join 127.0.0.1:4222 --output b-mean.safetensors

    \b
    Files on one disk need no run and no network:
      averaging peer a.safetensors b.safetensors --output mean.safetensors

    A round needs a group of peers that look for one at the same time. A peer that finds none within --round-timeout
    exits with code 1 and says which peers were there and what they answered. A round that fails is tried again
    --retries times. With --serve the peer continues after such failures.

    Ctrl+C, SIGTERM, SIGHUP or a signal of --leave-on lets a round in progress end, a second one does not; `averaging
    leave` is like SIGTERM. With --serve the exit code is 0 then; without it 128 plus the number of the signal, and
    nothing is written, unless all rounds were done.

    Exit codes: 0 done; 1 a round failed, no peer of --join answered, or the port is taken; 2 wrong usage, unreadable
    input, or all of --join have another run, token or certificate authority; 128 plus the number of a signal.

    \b
    Events of --json, each with "event":
      seeds    source (of --join, such as dns:NAME:PORT), addresses, own (those of this peer), failure (or null):
               first, and whenever the answer of a source changes
      joining  seconds, timeout, waiting_for (why each of --join has not answered): after 1 s, then less and less often
      ready    endpoint, join (for --join of other peers; null for a client and with etcd), run_id, mode, schema_hash,
               tensors, bytes, kept (names of the tensors that are not averaged), with --metrics-listen also metrics
      round    round (from 1), group_id, members, dropped, dropped_reasons, gathered (both by endpoint), seconds,
               allreduce_seconds, bytes_sent, bytes_received, part_bytes_sent and part_bytes_received (those of them
               that are parts; the rest are averages), kept_local (elements), clamped (values), state_version
      retry    round, outcome (no_group or failed), message, members, dropped, dropped_reasons, seconds
      unwritten  round, output, message: for example a full disk; --serve tries again after the next round
      serving  rounds, output (null if nothing was written): --rounds are done, --serve continues
      done     rounds, output; of several files: files, output
    """
    if len(files) > 1:
        with reporting(verbose, as_json=as_json) as report:
            _average_here(files, output, given, report)
        return
    config = options.read_config(output, given)
    with reporting(verbose, as_json=as_json) as report:
        _run(files[0], output, config, given, report)


OF_FILES = {"files", "output", "overwrite", "only", "exclude", "as_json", "verbose"}  # options of several files


def _average_here(files: Sequence[Path], output: Path | None, given: dict[str, Any], report: CommandOutput) -> None:
    """Writes the mean of several files, each with the same weight."""
    context = click.get_current_context()
    typed = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if output is None or not OF_FILES.issuperset(typed):
        useless = listed([f"--{name.replace('_', '-')}" for name in typed if name not in OF_FILES])
        remedy = f"leave out {useless}; a peer of a run brings one file" if useless else "give --output"
        raise click.UsageError(f"Several files are averaged here, without a run: {remedy}.")
    import torch

    destination = Output(output, overwrite=given["overwrite"])
    documents = [read(file).divided(file, given["only"], given["exclude"]) for file in files]
    first = {name: (tensor.dtype, tensor.shape) for name, tensor in documents[0].tensors.items()}
    for file, document in zip(files, documents, strict=True):
        check_can_be_averaged(file, document.tensors, allow_non_finite=False)
        here = {name: (tensor.dtype, tensor.shape) for name, tensor in document.tensors.items()}
        if differing := sorted(name for name in first.keys() | here.keys() if first.get(name) != here.get(name)):
            raise InputError(f"{file} differs from {files[0]} in {listed(differing)}; average files of one model")
    tensors = {
        name: torch.stack([document.tensors[name].double() for document in documents]).mean(0).to(dtype)
        for name, (dtype, _) in first.items()
    }
    destination.write(tensors | documents[0].kept, documents[0].metadata)
    text = f"done: {counted(len(files), 'file')} averaged, wrote {output}"
    report.emit({"event": "done", "files": len(files), "output": str(output)}, text)


def _run(file: Path, output: Path | None, config: PeerConfig, given: dict[str, Any], report: CommandOutput) -> None:
    keep_freed_memory()
    compute_in_one_thread()
    destination = Output(output, overwrite=given["overwrite"]) if output else None
    document = read(file).divided(file, given["only"], given["exclude"])
    # An auxiliary contributes no numbers.
    lenient = config.non_finite is NonFinite.ALLOW or config.mode is Mode.AUXILIARY
    check_can_be_averaged(file, document.tensors, allow_non_finite=lenient)
    patterns = [word for name in ("only", "exclude") for pattern in given[name] for word in (f"--{name}", pattern)]
    plan = RoundPlan(
        rounds=given["rounds"] or (None if given["serve"] else 1),
        **{name: given[name] for name in ("serve", "retries", "interval", "weight")},
        join_command=[*options.join_command(file, config), *patterns],
    )
    session = CommandSession(plan, document, destination, report)

    async def average(stop: Stop) -> None:
        await session.run(_make_peer(document, config, report, stop, serve=given["serve"]), stop)

    try:
        run(average, config.leave_on)
    except Stopped as stop:
        if not given["serve"]:
            rounds = f"{session.rounds} of {counted(given['rounds'] or 1, 'round')}"
            written = f"wrote {session.output}" if session.output else "nothing was written"
            raise Stopped(stop.number, f" after {rounds}; {written}") from None
    if session.unwritten:
        raise CommandError(session.unwritten)
    why_not = "no --output was given" if destination is None else "no round was done"
    text = f"wrote {session.output}" if session.output else f"nothing written: {why_not}"
    event = {"event": "done", "rounds": session.rounds, "output": session.output}
    report.emit(event, f"done: {counted(session.rounds, 'round')}, {text}")


def _make_peer(document: Document, config: PeerConfig, report: CommandOutput, stop: Stop, *, serve: bool) -> Peer:
    from averaging.elastic import RegisterService
    from averaging.peer import Peer, PeerContext

    return Peer(
        document.tensors,
        config=config,
        context=PeerContext(
            on_joining=lambda waiting: report.note(*joining(waiting)),
            on_found=lambda found: report.note(*found_seeds(found)),
            on_leave=lambda: stop.request(signal.SIGTERM),
        ),
        services=[RegisterService()] if serve and config.mode is not Mode.CLIENT else [],  # for elastic torchrun jobs
    )


RETRY_PAUSE = 1.0  # seconds between a failed round and the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    rounds: int | None  # None for no limit
    serve: bool  # after the rounds until a signal; rounds that fail are tried again forever
    retries: int  # of failed rounds in a row
    interval: float  # seconds after each round
    weight: float
    join_command: Sequence[str]  # with which another peer joins this one, without `--join` and its value


class CommandSession:
    """One invocation of the command.

    Attributes:
        rounds: number of rounds that averaged.
        unwritten: why the output could not be written; empty if it was not tried or succeeded.
    """

    def __init__(self, plan: RoundPlan, document: Document, output: Output | None, report: CommandOutput) -> None:
        self._plan, self._document, self._output, self._report = plan, document, output, report
        self._peer: Peer
        self._topic: Topic | None = None  # the peer's own tensors
        self.rounds = 0
        self.unwritten = ""
        self._written = self._writing = False

    @property
    def output(self) -> str | None:
        return str(self._output.path) if self._output and self._written else None

    async def run(self, peer: Peer, stop: Stop) -> None:
        self._peer, plan, kept = peer, self._plan, list(self._document.kept)
        if not plan.serve and peer.config.reply_form is ReplyForm.AVERAGE:
            # No later round would mend what is written at the end.
            from averaging.peer import Adopt

            self._topic = peer.topic("", self._document.tensors, adopt=Adopt.WHOLE, commits=True)
        async with peer:
            stop.wait = self._must_finish
            in_etcd = bool(peer.config.etcd)
            command = [*plan.join_command, *([] if in_etcd else ["--join", peer.endpoint])]
            mode = peer.config.mode.name.lower()
            item = ready(peer.endpoint, peer.run_id, mode, peer.schema, command, kept, in_etcd=in_etcd)
            self._report.emit(*with_metrics(item, peer.metrics_endpoint))
            await self._average_until_done(stop)
            stop.wait = lambda: True  # leaving takes at most a second

    def _must_finish(self) -> bool:
        # A signal is delayed then: leaving during an all-reduce would harm the other members.
        return self._writing or bool(self._peer.status.group_id)

    async def _average_until_done(self, stop: Stop) -> None:
        plan, failures = self._plan, 0
        while True:
            receipt = await self._attempt()
            if receipt.averaged:
                failures = 0
                await self._finish_round(receipt)
            elif plan.serve or (receipt.outcome is Outcome.FAILED and failures < plan.retries):
                failures += 1
                of_round = {"round": self.rounds + 1, "outcome": receipt.outcome.value, "message": receipt.reason}
                event = {"event": "retry", **of_round, **_members(receipt), "seconds": round(receipt.seconds, 6)}
                self._report.emit(event, not_averaged(self._name, receipt))
            else:
                raise CommandError(self._failure_text(receipt))
            if not plan.serve and plan.rounds is not None and self.rounds >= plan.rounds:
                break
            if stop.number:
                raise Stopped(stop.number)
            await asyncio.sleep(plan.interval if receipt.averaged else RETRY_PAUSE)

    @property
    def _name(self) -> str:
        number, rounds = self.rounds + 1, self._plan.rounds
        return f"round {number} of {rounds}" if rounds and number <= rounds else f"round {number}"

    async def _attempt(self) -> Receipt:
        def describe() -> str:
            status = self._peer.status
            if status.members:
                return f"{self._name}: averaging with {len(status.members) - 1} others"
            others = counted(status.known_peers - 1, "other peer")
            return f"{self._name}: looking for a group, {others} seen"

        async with self._report.waiting(describe):
            return await self._peer.average(self._topic, weight=self._plan.weight)

    async def _finish_round(self, receipt: Receipt) -> None:
        name = self._name
        self.rounds += 1
        self._report.emit(*averaged(name, self.rounds, self._peer.endpoint, receipt))
        reached = self.rounds == self._plan.rounds
        if self._plan.serve or reached:
            await self._write()
        if self._plan.serve and reached:
            event = {"event": "serving", "rounds": self.rounds, "output": self.output}
            self._report.emit(event, f"{counted(self.rounds, 'round')} done, continuing until Ctrl+C")

    async def _write(self) -> None:
        if self._output is None:
            return
        # The tensors are written only in rounds, so they need no lock here.
        self._writing = True
        self._written, self.unwritten = False, ""
        document = self._document
        write = asyncio.to_thread(self._output.write, document.tensors | document.kept, document.metadata)
        writing = asyncio.create_task(write)
        cancelled = await _until_done(writing)
        try:
            writing.result()
            self._written = True
        except NotWrittenError as error:
            if not self._plan.serve:
                raise
            # Other peers depend on this peer, and the disk may have space again after the next round.
            self.unwritten = error.message
            event = {"event": "unwritten", "round": self.rounds - 1, "output": str(self._output.path)}
            text = f"{error.message}; averaging continues, and the file is tried again after the next round"
            self._report.emit({**event, "message": error.message}, text)
        finally:
            self._writing = False
        if cancelled:
            raise asyncio.CancelledError

    def _failure_text(self, receipt: Receipt) -> str:
        text = not_averaged(self._name, receipt)
        if receipt.outcome is Outcome.FAILED:
            text += f" ({counted(self._plan.retries + 1, 'round')} failed in a row; --retries allows more)"
        return f"{text}. Nothing was written"


async def _until_done(task: asyncio.Task[None]) -> bool:
    """Waits for a task in a thread, which cannot be cancelled. Returns whether this wait was cancelled meanwhile."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


# What is printed: an event for --json, and the same as text for people.


def joining(waiting: Waiting) -> Item:
    """The peer still waits for an answer from one of --join."""
    event = {"event": "joining", "seconds": round(waiting.seconds, 3), "timeout": waiting.timeout}
    text = f"joining: {printable(str(waiting))}; --join-timeout limits this"
    return {**event, "waiting_for": dict(waiting.reasons)}, text


def found_seeds(found: FoundSeeds) -> Item:
    """A source in --join has answered, or failed, otherwise than before."""
    event = {"event": "seeds", "source": found.source, "addresses": list(found.addresses), "own": list(found.own)}
    return {**event, "failure": found.failure or None}, printable(str(found), 1000)


def ready(
    endpoint: str,
    run_id: str,
    mode: str,
    schema: Schema,
    join_command: Sequence[str],
    kept: Sequence[str] = (),
    *,
    in_etcd: bool = False,
) -> Item:
    """The peer serves and is part of its run; how other peers join it, or the run if that meets in etcd."""
    is_client = endpoint.startswith(CLIENT_PREFIX)
    event = {
        "event": "ready",
        "endpoint": endpoint,
        "join": None if is_client or in_etcd else endpoint,
        "run_id": run_id,
        "mode": mode,
        "schema_hash": schema.hash.hex(),
        "tensors": len(schema.tensors),
        "bytes": schema.nbytes,
        "kept": list(kept),
    }
    text = (
        f"{endpoint} is up in run {printable(run_id)}: "
        f"{counted(len(schema.tensors), 'tensor')}, {size(schema.nbytes)}, schema {schema.hash.hex()[:8]}"
    )
    if kept:
        text += f"\nnot averaged, but kept as they are: {listed(kept)}"
    if is_client and not in_etcd:
        return event, f"{text}\nother peers cannot join through it: it is a client"
    if not is_client and is_loopback(parse_address(endpoint)[0]):
        where = "in another terminal of this machine (for other machines, --listen on an address that they can reach)"
    else:
        join_command = [*join_command, "--mode", "client"]
        where = "(or instead of --mode client with --listen on an address that other peers can reach)"
    return event, f"{text}\njoin {'its run' if in_etcd else 'it'} {where}:\n  {shlex.join(join_command)}"


def averaged(name: str, number: int, endpoint: str, receipt: Receipt) -> Item:
    """Round `number`, counted from 1, averaged; `endpoint` is that of this peer."""
    gathered = {member: plain(value) for member, value in receipt.gathered.items()}
    event = {
        "event": "round",
        "round": number,
        "group_id": receipt.group_id.hex(),
        **_members(receipt),
        "gathered": gathered,
        "seconds": round(receipt.seconds, 6),
        "allreduce_seconds": round(receipt.allreduce_seconds, 6),
        "bytes_sent": receipt.bytes_sent,
        "bytes_received": receipt.bytes_received,
        "part_bytes_sent": receipt.part_bytes_sent,
        "part_bytes_received": receipt.part_bytes_received,
        "kept_local": receipt.kept_local,
        "clamped": receipt.clamped,
        "state_version": receipt.state_version,
    }
    others = listed([printable(member) for member in receipt.members if member != endpoint])
    lines = [
        f"{name}: averaged with {others} in {duration(receipt.seconds)} "
        f"(all-reduce {duration(receipt.allreduce_seconds)}, {size(receipt.bytes_sent)} sent, "
        f"{size(receipt.bytes_received)} received)"
    ]
    lines += [
        f"  {printable(member)} sent {printable(str(data))}" for member, data in gathered.items() if data is not None
    ]
    lines += [f"  lost {printable(dropped.endpoint)}: {printable(dropped.reason)}" for dropped in receipt.dropped]
    if receipt.kept_local:
        lines.append(f"  {counted(receipt.kept_local, 'element')} kept the local value, because their reducer was lost")
    if receipt.clamped:
        lines.append(f"  {receipt.clamped_text}")
    return event, "\n".join(lines)


def not_averaged(name: str, receipt: Receipt) -> str:
    reason = printable(receipt.reason)
    if receipt.outcome is Outcome.NO_GROUP:
        return f"{name}: no group within {receipt.seconds:.1f} s: {reason}"
    return f"{name}: failed after {receipt.seconds:.1f} s: {reason}"


def _members(receipt: Receipt) -> dict[str, Any]:
    return {
        "members": list(receipt.members),
        "dropped": [dropped.endpoint for dropped in receipt.dropped],
        "dropped_reasons": {dropped.endpoint: dropped.reason for dropped in receipt.dropped},
    }


@click.command("leave")
@click.argument("address", type=options.DIALLED, metavar="HOST:PORT")
@options.seconds("--timeout", "Give up waiting after this time. The peer leaves all the same.", 120.0)
@options.security_options
@options.output_options
def leave_command(address: str, timeout: float, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Ends the peer at HOST:PORT in order, and waits until it has left its run.

    The peer begins no further group, ends its round, and lets newcomers that download its state end (for at most 20 s);
    then it withdraws its records, and its process ends as with SIGTERM, also a training process and the torchrun that
    has started it. The other peers lose nothing. See docs/how-to/end-a-run.md.

    It is for the owner of the peer: its user, or root, on its machine; with TLS also the holder of a certificate for
    the host of HOST:PORT. In a run with a token or TLS, the options for them are needed in each case.

    \b
    On the peer's machine, for example before a reboot, and from elsewhere:
      averaging leave 127.0.0.1:4222
      averaging leave a.example.org:4222 --tls-ca ca.pem --tls-cert a.pem --tls-key a.key

    \b
    Events of --json, each with "event":
      leaving  endpoint, run_id, step: round, downloads or closing
      left     endpoint, run_id
    """
    asked: list[LeaveStep] = []

    async def leave(_: Stop) -> None:
        try:
            async with asyncio.timeout(timeout):
                await _leave(address, options.credentials_of(given), report, asked)
        except TimeoutError:
            raise _not_yet(address, timeout, asked) from None

    with reporting(verbose, as_json=as_json) as report:
        try:
            run(leave)
        except Stopped as stop:
            raise Stopped(stop.number, f"; {address} was asked and leaves all the same" if asked else "") from None


def _not_yet(address: str, timeout: float, asked: list[LeaveStep]) -> CommandError:
    if not asked:
        return CommandError(f"{address} has not answered within {timeout:g} s (--timeout); {check_address()}")
    doing = DOING[asked[-1].name]
    return CommandError(f"{address} has not left after {timeout:g} s (--timeout): {doing}. It leaves when that is over")


DOING = {
    "ROUND": "it ends its round",
    "DOWNLOADS": "newcomers download its state",
    "CLOSING": "it withdraws its records",
}


async def _leave(address: str, credentials: Credentials, report: CommandOutput, asked: list[LeaveStep]) -> None:
    from averaging.control import LEAVE, LEAVE_REQUEST, LeaveStep, step_of
    from averaging.errors import AveragingError, PeerUnreachableError, RefusalCause, refusal_cause
    from averaging.rpc import RpcChannel

    why = "it ended the call"
    try:
        async with (
            RpcChannel(address, credentials=credentials) as channel,
            aclosing(channel.stream(LEAVE, LEAVE_REQUEST)) as replies,
        ):
            async for reply in replies:
                step = step_of(reply)
                if step not in asked:
                    asked.append(step)
                    _tell(step, printable(reply.endpoint, 256), printable(reply.run_id, 128), report)
                if step is LeaveStep.LEFT:
                    return
    except PeerUnreachableError as error:
        if not asked:
            raise
        why = str(error)
    except AveragingError as error:
        if refusal_cause(error) is not RefusalCause.NOT_SERVED:
            raise
        text = "it does not leave on request: its program, or its release, does not serve that; send it SIGTERM"
        raise CommandError(f"{address}: {text}") from None
    last = f"the last it said was: {DOING[asked[-1].name]}" if asked else "it said nothing"
    raise CommandError(f"{address} was lost before it had left ({why}); {last}")


def _tell(step: LeaveStep, endpoint: str, run_id: str, report: CommandOutput) -> None:
    name, run = step.name.lower(), f" run {run_id}" if run_id else ""
    peer = {"endpoint": endpoint, "run_id": run_id}
    if name == "left":
        report.emit({"event": "left", **peer}, f"{endpoint} has left{run}")
    else:
        report.note({"event": "leaving", "step": name, **peer}, f"{endpoint} leaves{run}: {DOING[step.name]}")
