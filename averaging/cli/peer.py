"""`averaging peer`: a process that averages the tensors of a file with the other peers of a run."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import events, options
from averaging.cli.exits import Stop, run
from averaging.cli.failure import WRONG_USAGE, CommandError, Stopped
from averaging.cli.files import Document, NotWrittenError, Output, check_can_be_averaged, read
from averaging.common import compute_in_one_thread, counted, keep_freed_memory
from averaging.config import NonFinite
from averaging.protocol import Mode, pack_gather
from averaging.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from averaging.cli.output import CommandOutput
    from averaging.config import PeerConfig
    from averaging.peer import Peer


@click.command("peer", cls=options.PeerCommand)
@click.argument("file", type=options.CheckedPath(), metavar="FILE.safetensors")
@options.peer_options
@options.count("--rounds", "Rounds to do.  [default: 1, or no limit with --serve]", metavar="K")
@options.switch("--serve", "Continue after the rounds: average and share the state until Ctrl+C or SIGTERM.")
@options.path("--output", "OUT.safetensors", "File for the average, written after all rounds; with --serve after each.")
@options.switch("--overwrite", "Let --output replace a file that exists, FILE included.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Average only tensors with such names, for example '*.lora_*', and keep the others as they are; may be given "
    "several times.",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Keep tensors with such names as they are; may be repeated."
)
@click.option("--weight", default=1.0, type=options.NOT_NEGATIVE, metavar="W", help="Weight of FILE in the average.")
@click.option("--gather", type=options.json_value, metavar="JSON", help="A value that the members of each round get.")
@options.count("--retries", "Retries after failed rounds in a row.", 2, least=0)
@click.option("--interval", default=0.0, type=options.NOT_NEGATIVE, metavar="SECONDS", help="Pause after each round.")
@options.output_options
def peer_command(file: Path, output: Path | None, *, as_json: bool, verbose: int, **given: Any) -> None:
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
    Reachable from other machines, behind a router that forwards port 4222, and a peer behind a firewall:
      averaging peer a.safetensors --run-id demo --listen 0.0.0.0:4222 --advertise example.org:4222 --serve \
        --tls-ca ca.pem --tls-cert a.pem --tls-key a.key
      averaging peer b.safetensors --run-id demo --join example.org:4222 --mode client \
        --tls-ca ca.pem --tls-cert b.pem --tls-key b.key

    A round needs a group of peers that look for one at the same time. A peer that finds none within --round-timeout
    exits with code 1 and says which peers were there and what they answered. A round that fails is tried again
    --retries times. With --serve the peer continues after such failures.

    Ctrl+C, SIGTERM, SIGHUP or a signal of --leave-on lets a round in progress end, a second one does not; `averaging
    leave` is like SIGTERM. With --serve the exit code is 0 then; without it 128 plus the number of the signal, and
    nothing is written, unless all rounds were done.

    \b
    Exit codes: 0 done; 1 a round failed, no peer of --join answered, or the port is taken;
    2 wrong usage, unreadable input, or all of --join have another run, token or certificate authority;
    130, 143 and so on: stopped by a signal before the rounds were done.

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
      done     rounds, output
      error    message
    """
    from averaging.cli.output import reporting

    config = options.read_config(output, given)
    with reporting(verbose, as_json=as_json) as report:
        _run(file, output, config, given, report)


def _run(file: Path, output: Path | None, config: PeerConfig, given: dict[str, Any], report: CommandOutput) -> None:
    keep_freed_memory()
    compute_in_one_thread()
    destination = Output(output, overwrite=given["overwrite"]) if output else None
    document = read(file).divided(file, given["only"], given["exclude"])
    # An auxiliary contributes no numbers.
    lenient = config.non_finite is NonFinite.ALLOW or config.mode is Mode.AUXILIARY
    check_can_be_averaged(file, document.tensors, allow_non_finite=lenient)
    try:
        pack_gather(given["weight"], config.bandwidth, config.mode, given["gather"])
    except ValueError as error:
        raise CommandError(f"--gather: {error}", WRONG_USAGE) from None
    session = CommandSession(_plan(file, config, given), document, destination, report)

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
    report.emit(*events.done(session.rounds, session.output, why_not))


def _plan(file: Path, config: PeerConfig, given: dict[str, Any]) -> RoundPlan:
    patterns = [word for name in ("only", "exclude") for pattern in given[name] for word in (f"--{name}", pattern)]
    return RoundPlan(
        rounds=given["rounds"] or (None if given["serve"] else 1),
        serve=given["serve"],
        retries=given["retries"],
        interval=given["interval"],
        weight=given["weight"],
        gather=given["gather"],
        join_command=[*options.join_command(file, config), *patterns],
    )


def _make_peer(document: Document, config: PeerConfig, report: CommandOutput, stop: Stop, *, serve: bool) -> Peer:
    from averaging.elastic import RegisterService
    from averaging.peer import Peer, PeerContext

    return Peer(
        document.tensors,
        config=config,
        context=PeerContext(
            on_joining=lambda waiting: report.note(*events.joining(waiting)),
            on_found=lambda found: report.note(*events.found_seeds(found)),
            on_leave=lambda: stop.request(signal.SIGTERM),
        ),
        # Elastic torchrun jobs of the run may meet here.
        services=[RegisterService()] if serve and config.mode is not Mode.CLIENT else [],
    )


RETRY_PAUSE = 1.0
"""Seconds between a failed round and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    rounds: int | None  # None for no limit
    serve: bool  # after the rounds until a signal; rounds that fail are tried again forever
    retries: int  # of failed rounds in a row
    interval: float  # seconds after each round
    weight: float
    gather: Any
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
        self.rounds = 0
        self.unwritten = ""
        self._written = self._writing = False

    @property
    def output(self) -> str | None:
        return str(self._output.path) if self._output and self._written else None

    async def run(self, peer: Peer, stop: Stop) -> None:
        self._peer, plan, kept = peer, self._plan, list(self._document.kept)
        async with peer:
            stop.wait = self._must_finish
            in_etcd = bool(peer.config.etcd)
            command = [*plan.join_command, *([] if in_etcd else ["--join", peer.endpoint])]
            mode = peer.config.mode.name.lower()
            ready = events.ready(peer.endpoint, peer.run_id, mode, peer.schema, command, kept, in_etcd=in_etcd)
            self._report.emit(*events.with_metrics(ready, peer.metrics_endpoint))
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
                self._report.emit(*events.retry(self._name, self.rounds + 1, receipt))
            else:
                raise CommandError(self._failure_text(receipt))
            if not plan.serve and plan.rounds is not None and self.rounds >= plan.rounds:
                break
            if stop.number:
                raise Stopped(stop.number)
            await asyncio.sleep(plan.interval if receipt.averaged else RETRY_PAUSE)

    @property
    def _name(self) -> str:
        return events.round_name(self.rounds + 1, self._plan.rounds)

    async def _attempt(self) -> Receipt:
        def describe() -> str:
            status = self._peer.status
            if status.members:
                return f"{self._name}: averaging with {len(status.members) - 1} others"
            return events.looking(self._name, status.known_peers - 1)

        async with self._report.waiting(describe):
            return await self._peer.average(weight=self._plan.weight, gather=self._plan.gather)

    async def _finish_round(self, receipt: Receipt) -> None:
        name = self._name
        self.rounds += 1
        self._report.emit(*events.averaged(name, self.rounds, self._peer.endpoint, receipt))
        reached = self.rounds == self._plan.rounds
        if self._plan.serve or reached:
            await self._write()
        if self._plan.serve and reached:
            self._report.emit(*events.serving(self.rounds, self.output))

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
            self._report.emit(*events.unwritten(self.rounds - 1, str(self._output.path), error.message))
        finally:
            self._writing = False
        if cancelled:
            raise asyncio.CancelledError

    def _failure_text(self, receipt: Receipt) -> str:
        text = events.not_averaged(self._name, receipt)
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
