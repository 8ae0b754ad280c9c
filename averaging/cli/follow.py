"""`averaging follow`: keeps a file at the newest published version of a model's weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import options
from averaging.cli.files import AdapterFolder, BaseFolder, NotWrittenError, Output, VersionedFolders, read
from averaging.cli.running import CommandError, CommandOutput, Stopped, reporting, run, with_metrics
from averaging.common import VERSION_KEY, counted, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from averaging.metrics import Samples
    from averaging.rpc import Credentials
    from averaging.weights import DividedSnapshot, FollowerOptions, ServedEngine, WeightSnapshot

ENGINE_KINDS = ("vllm", "sglang")

DIGEST_KEY, LAYOUT_KEY = "averaging.digest", "averaging.order"
"""Keys in the file's metadata: the digest of the weights as published, and the digest of them in the order of the file.

Of a model in parts, which has no digest of its own, both are that of the whole tensors in the order of the file.
"""


@click.command("follow")
@click.argument("addresses", type=options.FOLLOWED_TYPE, nargs=-1, required=True, metavar="HOST:PORT|URL|DIR...")
@options.path(
    "--output", "FILE.safetensors|DIR", "The file to keep; with --config or --layout the directory of the versions."
)
@options.one_of("--layout", "Write each version of a published adapter as a folder that peft and engines load.", "peft")
@options.option(
    "--engine",
    "Have this server load each version: vLLM instead of --output or after it, with workers that get the weights from "
    "--listen; SGLang from the folders of --output and --config, of which it must have the same path.",
    "vllm=URL|sglang=URL",
)
@options.option(
    "--adapter",
    "With --engine: load each version of a published adapter beside those before, under the name NAME-VERSION. "
    "--output, by default NAME, is the directory of their folders, of which the engine must have the same path.",
    "NAME",
)
@options.one_of(
    "--engine-pause",
    "Whether the engine finishes its requests before it loads a version, goes on with them after, or aborts them.",
    *("wait", "keep", "abort"),
    default="wait",
)
@options.switch("--overwrite", "Replace --output if it is a file that this command did not write.")
@options.model_folder_options
@options.count(
    "--keep", "With folders: versions to keep. With --adapter: those that stay loaded, and twice as many folders.", 2
)
@options.option(
    "--exec",
    "Run this shell command after each version. It finds the version in AVERAGING_VERSION and the file, or the "
    "folder of the version, in AVERAGING_FILE. With --json its output goes to stderr.",
    "COMMAND",
    name="command",
)
@options.seconds(
    "--exec-timeout", "End the command of --exec after this time; the next gets the newest version.", 300.0
)
@options.flag("run_id", help="Follow only the weights of this run.")
@options.switch("--once", "Write one version and end.")
@options.count("--min-version", "Write no version below this.", 0, least=0)
@options.seconds("--wait", "With --once: fail if there is no version in this time. By default, it waits without limit.")
@options.seconds(
    "--timeout", "Give up at the start if no publisher answers so long, later leave a source that is silent.", 10.0
)
@options.max_bytes_option("Refuse larger weights, because two to three copies are kept in memory.")
@options.flag(
    "listen",
    default="127.0.0.1:0",
    help="Address at which it hands on versions; port 0 takes a free one. On loopback, only followers of this machine "
    "can use it, and only if HOST:PORT is on loopback too.",
)
@options.flag("advertise")
@options.flag("metrics_listen")
@options.security_options
@options.insecure_option
@options.output_options
def follow_command(
    addresses: tuple[str, ...], output: Path | None, *, as_json: bool, verbose: int, **given: Any
) -> None:
    r"""Keeps --output at the newest version of the weights that the peer at HOST:PORT publishes.

    The peer must publish weights: its averager has services=[WeightPublisher(model)]. With WeightPublisher(model, to=…)
    they are also followed through s3://BUCKET/RUN, https://HOST/RUN, or a folder such as /mnt/run or ./run. If ranks of
    fully_shard publish their parts, give the address of rank 0. With several addresses, the next one is followed if one
    is lost. Each version is verified, and replaces the file in one step. If the disk is full, the old file stays.

    Only what changed since the last version is received, also if this command is started again. Versions that come
    faster than they are written are left out, never the newest. While the command of --exec runs, the file stays as it
    is. The file's metadata has the version ("averaging.version") and the digest of the weights ("averaging.digest").

    With --config, each version is a folder in --output that from_pretrained of transformers reads, and the link
    `newest` moves in one step.

    With --layout peft or --adapter, the peer must publish an adapter: WeightPublisher(strategy.adapter_view(rank=64)).

    \b
    Have a server load each version, or download one, at least the 500th:
      averaging follow a.example:4222 --output now.safetensors --exec 'curl -fsS -X POST localhost:8000/reload'
      averaging follow a.example:4222 --engine vllm=http://127.0.0.1:8000
      averaging follow a.example:4222 --engine vllm=http://127.0.0.1:8000 --adapter tune
      averaging follow a.example:4222 --output now.safetensors --once --min-version 500 --wait 600

    Exit codes: 0 done, or stopped by Ctrl+C or SIGTERM; 1 no publisher answered, or --once found no version in time or
    could not write it; 2 wrong usage. With --once, 130 and 143 if a signal stops it.

    \b
    Events of --json, each with "event":
      ready       publishers, endpoint, with --metrics-listen also metrics (its address)
      written     version, digest, bytes, received, output, frozen (tensors from --config), error (of an adapter that
                  was cut to a rank: relative, in the Frobenius norm)
      unwritten   version, output, message
      loaded      version, engine, seconds
      unloaded    version, engine, message, partial: the engine did not load it; it is tried again. While partial is
                  true it is paused, because some of its workers may have a part of a version
      executed    version, exit_code, seconds; after --exec-timeout exit_code is null, and there is a message
    """
    if given["wait"] is not None and not given["once"]:
        raise click.UsageError("--wait needs --once.")
    if given["adapter"] is not None:
        output, given["layout"] = output or Path(given["adapter"]), "peft"
    kind, _, url = (given["engine"] or "").partition("=")
    if given["engine"] is None:
        if output is None:
            raise click.UsageError("Missing option '--output', or '--engine'.")
        if given["adapter"] is not None:
            raise click.UsageError("--adapter needs --engine.")
    elif kind not in ENGINE_KINDS or not url:
        raise click.UsageError("--engine must be vllm=http://HOST:PORT or sglang=http://HOST:PORT.")
    elif kind == "sglang" and given["adapter"] is None and given["config"] is None:
        raise click.UsageError("--engine sglang=… needs --output DIR with --config, or --adapter: it reads folders.")
    for option, value in (("--exec", given["command"]), ("--config", given["config"]), ("--layout", given["layout"])):
        if output is None and value is not None:
            raise click.UsageError(f"{option} needs --output.")
    if given["layout"] is not None and given["config"] is not None:
        raise click.UsageError("--config is for whole models; leave it out with --layout and --adapter.")
    with reporting(verbose, as_json=as_json) as report:
        _run(list(dict.fromkeys(addresses)), output, given, report)


def _run(addresses: list[str], output: Path | None, given: dict[str, Any], report: CommandOutput) -> None:
    from averaging.weights import FollowerOptions, VllmServer

    credentials = options.credentials_of(given)
    engine = _engine(given, credentials)
    follower = FollowerOptions(
        join=addresses,
        run_id=given["run_id"] or "",
        credentials=credentials,
        # vLLM's workers get what they load from the engine's own publisher, at --listen.
        listen=None if isinstance(engine, VllmServer) else given["listen"],
        advertise=given["advertise"],
        join_timeout=given["timeout"],
        stall_timeout=given["timeout"],
        max_bytes=given["max_bytes"],
        min_version=given["min_version"],
    )
    session = FollowSession(follower, output, engine, given, report)
    try:
        run(lambda _: session.run(), when="; nothing was written")
    except Stopped:
        if given["once"]:
            raise


def _engine(given: dict[str, Any], credentials: Credentials) -> ServedEngine | None:
    from averaging.weights import AdapterServer, SglangServer, VllmServer

    if given["engine"] is None:
        return None
    kind, _, url = given["engine"].partition("=")
    if given["adapter"] is not None:
        return AdapterServer(url, kind=kind, name=given["adapter"], keep=given["keep"])
    if kind == "sglang":
        return SglangServer(url, pause=given["engine_pause"])
    files = {name: str(Path(given[name]).resolve()) for name in options.SECURITY if given[name] is not None}
    return VllmServer(
        url,
        given["listen"],
        advertise=given["advertise"],
        credentials=credentials,
        init_info={"run_id": given["run_id"] or "", **files},
        pause=given["engine_pause"],
    )


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    version: int
    digest: str  # see `DIGEST_KEY`
    nbytes: int
    path: Path | None  # None if only an engine has them
    frozen: int = 0  # tensors of --config
    error: float = 0.0  # of an adapter that was cut to a rank


def _open(
    path: Path | None, given: dict[str, Any]
) -> tuple[Output | VersionedFolders | None, WeightSnapshot | None, WrittenWeights | None]:
    """Checks that the output can be written, and reads it back if this command has written it."""
    if path is None:
        return None, None, None
    if given["config"] is None and given["layout"] is None:
        base, written = _read_back(path)
        output = Output(path, overwrite=given["overwrite"] or base is not None)
        return output, base, None if base is None else written
    content = BaseFolder(given["config"], given["max_shard_bytes"]) if given["config"] else AdapterFolder()
    # An engine reads the folder of an adapter again for requests that have begun before it was unloaded.
    folders = VersionedFolders(path, content, given["keep"] * (1 if given["adapter"] is None else 2))
    return folders, *((None, None) if folders.newest is None else _read_back(folders.newest))


def _read_back(path: Path) -> tuple[WeightSnapshot | None, WrittenWeights | None]:
    """What a file or a folder says that it is, and its tensors if they are as they were published.

    A folder may lack copies of tied tensors, and have those of --config: then the next version is received as a whole.
    """
    from averaging.weights import seal, view_state

    try:
        documents = [read(file) for file in (path.glob("*.safetensors") if path.is_dir() else [path])]
        tensors = {name: tensor for document in documents for name, tensor in document.tensors.items()}
        metadata = documents[0].metadata or {}
        version = int(metadata[VERSION_KEY])
        base = seal(view_state(dict(sorted(tensors.items()))), version, None)
    except (CommandError, IndexError, KeyError, ValueError):  # nothing, or nothing of this command
        return None, None
    digest = base.manifest.digest.hex()
    written = WrittenWeights(version, metadata.get(DIGEST_KEY, digest), base.manifest.layout.nbytes, path)
    return (base if metadata.get(LAYOUT_KEY) == digest else None), written


class FollowSession:
    """One invocation of the command: receives versions, and hands each to the output, the command and the engine."""

    def __init__(
        self,
        follower: FollowerOptions,
        path: Path | None,
        engine: ServedEngine | None,
        given: dict[str, Any],
        report: CommandOutput,
    ) -> None:
        from averaging.metrics import MetricsListener
        from averaging.weights import FOLLOWER_METRICS, ModelReceiver, StalenessWatch

        self._watch = StalenessWatch()
        self._metrics = MetricsListener(
            given["metrics_listen"], "averaging follow", FOLLOWER_METRICS, self._sample, self._not_ready
        )
        self._output, base, self._written = _open(path, given)
        self._receiver = ModelReceiver(follower, base=base, on_progress=self._advance)
        self._options, self._report = follower, report
        self._engine, self._given = engine, given
        self._here = Path.cwd()
        self._executing: int | None = None  # the version for which the command runs
        self._once: bool = given["once"]
        self._progress: tuple[int, int] | None = None
        self._received = 0  # bytes of the versions written so far

    async def run(self) -> None:
        async with self._metrics, self._receiver as receiver, self._engine or nullcontext() as engine:
            publishers = list(self._options.join)
            endpoint = receiver.endpoint or (engine.endpoint if engine is not None else "")
            handing_on = f", handing on at {endpoint}" if endpoint else ""
            ready = {"event": "ready", "publishers": publishers, "endpoint": endpoint or None}
            item = ready, f"following {', '.join(publishers)}{handing_on}"
            self._report.emit(*with_metrics(item, self._metrics.endpoint))
            async with self._report.waiting(self._describe):
                await self._follow()

    def _sample(self) -> Samples:
        from averaging.weights import follower_samples

        receiver, version = self._receiver, self._version()
        newest = None if receiver.announced is None else receiver.announced.version
        stale = self._watch.look(time.monotonic(), version, newest, connected=receiver.connected)
        partial = None if self._engine is None else self._engine.partial
        samples = follower_samples(receiver, self._options.credentials, version, stale.versions, stale.seconds)
        return samples if partial is None else {**samples, "averaging_follower_partial_version": partial}

    def _not_ready(self) -> str:
        if self._engine is not None and self._engine.partial is not None:
            return f"the engine is paused: some of its workers may have a part of version {self._engine.partial}"
        return "no version is written yet" if self._version() is None else ""

    def _version(self) -> int | None:
        if self._engine is not None:
            return self._engine.version
        return None if self._written is None else self._written.version

    async def _follow(self) -> None:
        written, receiver, wait, least = self._written, self._receiver, self._given["wait"], self._given["min_version"]
        announced = -1 if receiver.announced is None else receiver.announced.version
        current = written is not None and written.version >= max(announced, least)
        if self._once and self._engine is None and written is not None and current:
            self._emit_written(written)
            return
        # An engine may lack what was written before this command was started again.
        has = least - 1 if written is None or self._engine is not None else written.version
        try:
            async with asyncio.timeout(wait):
                await receiver.wait_newer(has, None)
        except TimeoutError:
            newest = receiver.announced
            there = "there is no version yet" if newest is None else f"the newest is {newest.version}"
            wanted = f"version {least} or newer" if least else "a version"
            text = f"{', '.join(self._options.join)} did not publish {wanted} within {wait:g} s: {there}"
            raise CommandError(f"{text}; wait longer, or lower --min-version") from None
        while True:
            if receiver.failure is not None:
                raise receiver.failure
            received = receiver.newest
            if received is not None:
                await self._take(received)
                if self._once:
                    return
                await receiver.wait_newer(received.manifest.version, None)

    async def _take(self, received: WeightSnapshot | DividedSnapshot) -> None:
        from averaging.tensors import in_thread

        version, whole = received.manifest.version, await in_thread(received.whole)
        try:
            written = await in_thread(lambda: self._write(received, whole))
        except NotWrittenError as error:
            if self._once:
                raise
            path = None if self._output is None else str(self._output.path)
            event = {"event": "unwritten", "version": version, "output": path}
            text = f"{error.message}; the next version is tried again"
            self._report.emit({**event, "message": error.message}, text)
            return
        if written.path is not None:
            self._written = written
            self._emit_written(written)
        if (command := self._given["command"]) is not None:
            await self._execute(command, written)
        if self._engine is not None and await self._load(self._engine, whole, written):
            self._written = written

    async def _load(self, engine: ServedEngine, whole: WeightSnapshot, written: WrittenWeights) -> bool:
        """Has the engine load a version, again and again until a newer one is here; returns whether it has."""
        from averaging.common import Backoff
        from averaging.errors import StateError
        from averaging.weights import MAX_PAUSE, MIN_PAUSE

        folder = None if written.path is None else self._here / written.path
        version, backoff, reasons = whole.manifest.version, Backoff(MIN_PAUSE, MAX_PAUSE), set[str]()
        event = {"version": version, "engine": engine.url}
        while True:
            began = time.monotonic()
            try:
                await engine.load(whole, folder)
            except StateError as error:
                if self._once:
                    raise
                if partial := engine.partial is not None:
                    await self._receiver.tell(None, version)  # again and again: the publisher may be a new one
                if str(error) not in reasons:  # once for each reason, however long the engine is away
                    reasons.add(str(error))
                    text = f"version {version} is not loaded: {error}; trying again"
                    self._report.emit({"event": "unloaded", **event, "message": str(error), "partial": partial}, text)
                if await self._receiver.wait_newer(version, backoff.next_delay()):
                    return False
                continue
            seconds = time.monotonic() - began
            await self._receiver.tell(version)
            text = f"version {version}: {engine.url} has loaded it in {seconds:.1f} s"
            self._report.emit({"event": "loaded", **event, "seconds": round(seconds, 3)}, text)
            return True

    def _write(self, received: WeightSnapshot | DividedSnapshot, whole: WeightSnapshot) -> WrittenWeights:
        from averaging.weights import WeightSnapshot

        version = received.manifest.version
        digest = (received if isinstance(received, WeightSnapshot) else whole).manifest.digest.hex()
        # A safetensors file has no order; the digest of the tensors by name is compared when the file is read back.
        metadata = {VERSION_KEY: str(version), DIGEST_KEY: digest, LAYOUT_KEY: whole.manifest.digest.hex()}
        path, frozen, error = None, 0, 0.0
        if isinstance(self._output, VersionedFolders):
            path, folder = self._output.write(version, whole.tensors(), metadata)
            frozen, error = folder.frozen, folder.error
        elif self._output is not None:
            path = self._output.path
            self._output.write(whole.tensors(), metadata)
        return WrittenWeights(version, digest, whole.manifest.layout.nbytes, path, frozen, error)

    def _emit_written(self, written: WrittenWeights) -> None:
        version, path, frozen = written.version, written.path, written.frozen
        received = self._receiver.bytes_received - self._received
        self._received += received
        and_more = f" and {counted(frozen, 'tensor')} of --config" if frozen else ""
        and_more += f", cut with a relative error of {written.error:.1e}" if written.error else ""
        of_version = {"event": "written", "version": version, "digest": written.digest, "bytes": written.nbytes}
        self._report.emit(
            {**of_version, "received": received, "output": str(path), "frozen": frozen, "error": written.error},
            f"version {version}: {size(written.nbytes)}{and_more}, received {size(received)}, wrote {path}",
        )

    async def _execute(self, command: str, written: WrittenWeights) -> None:
        version = written.version
        environment = {"AVERAGING_VERSION": str(version), "AVERAGING_FILE": str(written.path)}
        began, limit = time.monotonic(), self._given["exec_timeout"]
        self._executing = version
        try:
            code = await run_command(command, environment, limit, stdout=self._report.stdout_of_children)
        finally:
            self._executing = None
        seconds = time.monotonic() - began
        event = {"event": "executed", "version": version, "exit_code": code, "seconds": round(seconds, 3)}
        if code is None:
            text = f"version {version}: the command of --exec was not done after {limit:g} s (--exec-timeout)"
            text = f"{text}; it was ended with its children"
            self._report.emit({**event, "message": text}, text)
        elif code:
            self._report.emit(event, f"version {version}: the command of --exec failed with exit code {code}")
        else:
            self._report.note(event, f"version {version}: the command took {seconds:.1f} s")

    def _advance(self, received: int, total: int) -> None:
        self._progress = None if received == total else (received, total)

    def _describe(self) -> str:
        announced = self._receiver.announced
        if self._executing is not None:
            return f"running the command for version {self._executing}"
        if not self._receiver.connected:
            return f"waiting for {', '.join(self._options.join)}"
        if self._progress is not None and announced is not None:
            received, total = map(size, self._progress)
            return f"receiving version {announced.version}: {received} of {total}"
        return "waiting for the next version"


async def run_command(
    command: str, environment: Mapping[str, str], timeout: float, *, stdout: int | None = None
) -> int | None:
    """Runs a shell command in a session of its own, so that Ctrl+C on the terminal does not reach it.

    If `timeout` seconds are over, or this is cancelled, all its processes are killed. What it leaves in the background
    when it ends by itself goes on. Returns its exit code, which is negative if a signal ended it; None after `timeout`.
    """
    environment = {**os.environ, **environment}
    process = await asyncio.create_subprocess_shell(
        command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=stdout, start_new_session=True
    )
    try:
        async with asyncio.timeout(timeout):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with suppress(OSError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
