"""The session of `averaging follow` after its arguments were checked."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from averaging.cli import console_text
from averaging.cli.console import CommandOutput
from averaging.cli.error_reporting import CommandError
from averaging.cli.state import VERSION_KEY
from averaging.cli.tensor_files import NotWrittenError, Output, read
from averaging.common.threads import in_thread
from averaging.errors import TensorError
from averaging.synchronizer.follower_tasks import FollowerOptions, FollowerTasks
from averaging.synchronizer.weights_layout import Manifest
from averaging.synchronizer.weights_snapshot import Snapshot, copy_state, seal

DIGEST_KEY, LAYOUT_KEY = "averaging.digest", "averaging.order"
"""Keys in the file's metadata: the digest of the weights, and the digest of them in the order of the file."""

END_SECONDS = 5.0
"""Seconds that a command has to end after SIGTERM."""


def open_output(path: Path, *, overwrite: bool) -> tuple[Output, Snapshot | None]:
    """Checks that the file can be written.

    Returns:
        The output, and the weights in the file if this command has written it before.

    Raises:
        CommandError: exit code 2: another file is there, or it cannot be written.
    """
    base = _read_back(path) if path.is_file() else None
    return Output(path, overwrite=overwrite or base is not None), base


def _read_back(path: Path) -> Snapshot | None:
    try:
        document = read(path)
        metadata = document.metadata or {}
        version = int(metadata[VERSION_KEY])
        base = seal(copy_state(document.tensors), version, None)
    except (CommandError, KeyError, ValueError):
        return None
    return base if metadata.get(LAYOUT_KEY) == base.manifest.digest.hex() else None


class FollowSession:
    """One invocation of the command.

    Args:
        options: of the follower.
        output: the file to keep.
        base: the weights that are in the file.
        given: the options of the command line.
        report: where events go.
    """

    def __init__(
        self,
        options: FollowerOptions,
        output: Output,
        base: Snapshot | None,
        given: dict[str, Any],
        report: CommandOutput,
    ) -> None:
        self._tasks = FollowerTasks(options, _check_whole, base=base, on_progress=self._advance)
        self._options, self._output, self._report = options, output, report
        self._command: str | None = given["command"]
        self._once: bool = given["once"]
        self._wait: float | None = given["wait"]
        self._min_version: int = given["min_version"]
        self._written = None if base is None else base.manifest.version
        self._progress: tuple[int, int] | None = None
        self._received = 0  # bytes of the versions written so far

    async def run(self) -> None:
        """Follows until a signal, or until one version is written.

        Raises:
            CommandError: there was no version in time, or it could not be written.
            AveragingError: no publisher answered, or all refuse this follower.
        """
        async with self._tasks as tasks:
            publishers = list(self._options.join)
            handing_on = f", handing on at {tasks.endpoint}" if tasks.endpoint else ""
            self._report.emit(
                {"event": "ready", "publishers": publishers, "endpoint": tasks.endpoint or None},
                f"following {', '.join(publishers)}{handing_on}",
            )
            async with self._report.waiting(self._describe):
                await self._follow()

    async def _follow(self) -> None:
        if self._once and not self._is_behind() and self._written is not None and self._written >= self._min_version:
            self._emit_written(self._tasks.newest)
            return
        try:
            async with asyncio.timeout(self._wait):
                await self._tasks.wait_newer(self._written, None)
        except TimeoutError:
            raise self._never_published() from None
        while True:
            if self._tasks.failure is not None:
                raise self._tasks.failure
            snapshot = self._tasks.newest
            if snapshot is not None:
                await self._take(snapshot)
                if self._once:
                    return
                await self._tasks.wait_newer(snapshot.manifest.version, None)

    def _is_behind(self) -> bool:
        """Whether a version is announced that the file does not have."""
        announced = self._tasks.announced
        return announced is not None and announced.version > (-1 if self._written is None else self._written)

    async def _take(self, snapshot: Snapshot) -> None:
        version = snapshot.manifest.version
        metadata = {VERSION_KEY: str(version), DIGEST_KEY: snapshot.manifest.digest.hex()}
        try:
            await in_thread(lambda: self._write(snapshot, metadata))
        except NotWrittenError as error:
            if self._once:
                raise
            event = {"event": "unwritten", "version": version, "output": str(self._output.path)}
            text = f"{error.message}; the next version is tried again"
            self._report.emit({**event, "message": error.message}, text)
            return
        self._written = version
        self._emit_written(snapshot)
        if self._command is not None:
            await self._execute(self._command, version)

    def _write(self, snapshot: Snapshot, metadata: dict[str, str]) -> None:
        tensors = snapshot.tensors()
        # A safetensors file has no order; this digest is compared when the file is read back.
        by_name = sorted(snapshot.manifest.layout.tensors, key=lambda spec: spec.name)
        layout = type(snapshot.manifest.layout)(tuple(by_name), snapshot.manifest.layout.piece_bytes)
        arranged = snapshot.arranged(layout)
        self._output.write(tensors, {**metadata, LAYOUT_KEY: arranged.manifest.digest.hex()})

    def _emit_written(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        manifest, path, nbytes = snapshot.manifest, self._output.path, snapshot.manifest.layout.nbytes
        size = console_text.size
        received = self._tasks.bytes_received - self._received
        self._received += received
        self._report.emit(
            {
                "event": "written",
                "version": manifest.version,
                "digest": manifest.digest.hex(),
                "bytes": nbytes,
                "received": received,
                "output": str(path),
            },
            f"version {manifest.version}: {size(nbytes)}, received {size(received)}, wrote {path}",
        )

    async def _execute(self, command: str, version: int) -> None:
        environment = {**os.environ, "AVERAGING_VERSION": str(version), "AVERAGING_FILE": str(self._output.path)}
        began = time.monotonic()
        process = await asyncio.create_subprocess_shell(command, env=environment, stdin=asyncio.subprocess.DEVNULL)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(END_SECONDS):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
            raise
        seconds = time.monotonic() - began
        event = {"event": "executed", "version": version, "exit_code": code, "seconds": round(seconds, 3)}
        if code:
            self._report.emit(event, f"version {version}: the command of --exec failed with exit code {code}")
        else:
            self._report.note(event, f"version {version}: the command took {seconds:.1f} s")

    def _never_published(self) -> CommandError:
        announced = self._tasks.announced
        newest = "there is no version yet" if announced is None else f"the newest is {announced.version}"
        wanted = f"version {self._min_version} or newer" if self._min_version else "a version"
        return CommandError(
            f"{', '.join(self._options.join)} did not publish {wanted} within {self._wait:g} s: {newest}; wait longer, "
            "or lower --min-version"
        )

    def _advance(self, received: int, total: int) -> None:
        self._progress = None if received == total else (received, total)

    def _describe(self) -> str:
        announced = self._tasks.announced
        if not self._tasks.connected:
            return f"waiting for {', '.join(self._options.join)}"
        if self._progress is not None and announced is not None:
            received, total = map(console_text.size, self._progress)
            return f"receiving version {announced.version}: {received} of {total}"
        return "waiting for the next version"


def _check_whole(manifest: Manifest) -> None:
    if manifest.shards or any(spec.whole for spec in manifest.layout.tensors):
        raise TensorError(
            f"the model is published in parts by {max(1, len(manifest.shards))} ranks, and a file of all of it is not "
            "written; follow it with averaging.Follower in a script, and save the model there"
        )
