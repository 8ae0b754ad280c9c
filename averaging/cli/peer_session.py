"""The session of `averaging peer` after its arguments were checked: rounds and serving until it is done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from averaging.cli import console as console_text
from averaging.cli import json_events
from averaging.cli.error_reporting import CommandError, Stopped, failure_of
from averaging.cli.tensor_files import Document, NotWrittenError, Output
from averaging.errors import AveragingError
from averaging.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from averaging.cli.console import CommandOutput
    from averaging.cli.signals import Stop
    from averaging.peer import Peer

RETRY_PAUSE = 1.0
"""Seconds between a failed round and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The options of the command line about rounds.

    Attributes:
        rounds: number of rounds; None for no limit.
        serve: whether to keep serving after them until a signal, and to retry rounds forever.
        retries: number of failed rounds in a row that are tried again.
        interval: pause after each round, in seconds.
        weight: weight of this peer's tensors.
        gather: data to send to the other members.
        join_command: the command with which another peer joins this one, without `--join` and its value.
    """

    rounds: int | None
    serve: bool
    retries: int
    interval: float
    weight: float
    gather: Any
    join_command: Sequence[str]

    def is_done(self, rounds: int) -> bool:
        """Whether the command ends after this number of rounds."""
        return not self.serve and self.rounds is not None and rounds >= self.rounds


class CommandSession:
    """One invocation of the command.

    Attributes:
        rounds: number of rounds that averaged.
        written: whether the output has the present result.
        unwritten: why it could not be written; empty if it was not tried or succeeded.
    """

    def __init__(
        self, plan: RoundPlan, peer: Peer, document: Document, output: Output | None, report: CommandOutput
    ) -> None:
        self._plan, self._peer = plan, peer
        self._document, self._output = document, output
        self._report = report
        self.rounds = 0
        self.written = False
        self.unwritten = ""
        self._writing = False

    @property
    def output(self) -> str | None:
        """Path of the output if it has the present result, else None."""
        return str(self._output.path) if self._output and self.written else None

    async def run(self, stop: Stop) -> None:
        """Joins the run, averages, writes the output, and leaves.

        Raises:
            CommandError: a round failed, or the output could not be written.
            Stopped: a signal ended the command early.
        """
        peer, plan, kept = self._peer, self._plan, list(self._document.kept)
        try:
            async with peer:
                stop.wait = self._must_finish
                command = [*plan.join_command, "--join", peer.endpoint]
                mode = peer.config.mode.name.lower()
                self._report.emit(
                    json_events.ready(peer.endpoint, peer.run_id, mode, peer.schema, kept),
                    console_text.ready(peer.endpoint, peer.run_id, peer.schema, command, kept),
                )
                await self._average_until_done(stop)
                stop.wait = lambda: True  # leaving takes at most a second
        except AveragingError as error:
            raise failure_of(error) from None

    def _must_finish(self) -> bool:
        """Whether a signal is delayed, because leaving during an all-reduce would harm the other members."""
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
                text = console_text.not_averaged(self._name, receipt)
                self._report.emit(json_events.retry(self.rounds + 1, receipt), text)
            else:
                raise CommandError(self._failure_text(receipt))
            if plan.is_done(self.rounds):
                break
            if stop.number:
                raise Stopped(stop.number)
            await asyncio.sleep(plan.interval if receipt.averaged else RETRY_PAUSE)

    @property
    def _name(self) -> str:
        return console_text.round_name(self.rounds + 1, self._plan.rounds)

    async def _attempt(self) -> Receipt:
        def describe() -> str:
            status = self._peer.status
            if status.members:
                return f"{self._name}: averaging with {len(status.members) - 1} others"
            return console_text.looking(self._name, status.known_peers - 1)

        async with self._report.waiting(describe):
            return await self._peer.average(weight=self._plan.weight, gather=self._plan.gather)

    async def _finish_round(self, receipt: Receipt) -> None:
        name = self._name
        self.rounds += 1
        event = json_events.averaged(self.rounds, receipt)
        self._report.emit(event, console_text.averaged(name, self._peer.endpoint, receipt, event["gathered"]))
        reached = self.rounds == self._plan.rounds
        if self._plan.serve or reached:
            await self._write()
        if self._plan.serve and reached:
            self._report.emit(
                json_events.serving(self.rounds, self.output),
                f"{console_text.counted(self.rounds, 'round')} done, continuing until Ctrl+C",
            )

    async def _write(self) -> None:
        if self._output is None:
            return
        # The tensors are written only in rounds, so they need no lock here.
        self._writing = True
        self.written, self.unwritten = False, ""
        document = self._document
        write = asyncio.to_thread(self._output.write, document.tensors | document.kept, document.metadata)
        writing = asyncio.create_task(write)
        cancelled = await _until_done(writing)
        try:
            writing.result()
            self.written = True
        except NotWrittenError as error:
            if not self._plan.serve:
                raise
            # Other peers depend on this peer, and the disk may have space again after the next round.
            self.unwritten = error.message
            text = f"{error.message}; averaging continues, and the file is tried again after the next round"
            self._report.emit(json_events.unwritten(self.rounds - 1, str(self._output.path), error.message), text)
        finally:
            self._writing = False
        if cancelled:
            raise asyncio.CancelledError

    def _failure_text(self, receipt: Receipt) -> str:
        text = console_text.not_averaged(self._name, receipt)
        if receipt.outcome is Outcome.FAILED:
            text += f" ({console_text.counted(self._plan.retries + 1, 'round')} failed in a row; --retries allows more)"
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
