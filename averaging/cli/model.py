"""`averaging state` and `averaging export`: what a peer holds, as a safetensors file or as a model's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import options
from averaging.cli.files import BaseFolder, Output, check_place, read, sync
from averaging.cli.running import CommandError, CommandOutput, InputError, Stop, reporting, run
from averaging.common import VERSION_KEY, counted, plain, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from averaging.state import State, StateAssembler

MAX_MESSAGE_BYTES = 64 << 20  # chunks of a state have at most 1 MiB, and its metadata at most 16 MiB

USER_KEY = "averaging.user"  # in the file's metadata
OF_AVERAGER = ("optimizer/", "strategy/")  # prefixes of what a state has beside the model
MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")  # where checkpoints have the model's state dict

UNCHECKED = "; --config has no weights, so the names and the number of tensors were not compared with a model"


def download_options(command: options.Command) -> options.Command:
    text = "Give up a silent peer after this time; after 10 times this if it is alive and may prepare a large state."
    limit = options.max_bytes_option("Refuse a larger state, because it is kept in memory.")
    return options.seconds("--timeout", text, 10.0)(limit(options.security_options(options.output_options(command))))


@click.command("state")
@click.argument("addresses", type=options.JOINED, nargs=-1, required=True, metavar="HOST:PORT...")
@options.path("--output", "FILE.safetensors", "Where to write it.", required=True)
@options.switch("--overwrite", "Replace --output if it exists.")
@download_options
def state_command(
    addresses: tuple[str, ...], output: Path, overwrite: bool, *, as_json: bool, verbose: int, **given: Any
) -> None:
    r"""Downloads the state of the peer at HOST:PORT and writes it to a safetensors file.

    The state is what the peer committed last: its averaged tensors, and what its application adds. Every tensor is
    compared with its digest; an incomplete download writes nothing. The file's metadata has the state's version
    ("averaging.version") and the application's own values ("averaging.user", as JSON). If a peer fails, the next one is
    asked.

    \b
    Download the state of a peer, then continue from it:
      averaging state 192.0.2.7:4222 --output now.safetensors
      averaging peer now.safetensors --run-id demo --join 192.0.2.7:4222 --output mean.safetensors

    \b
    Events of --json, each with "event":
      started  version, tensors, bytes
      done     version, tensors, bytes, user, output
    """
    with reporting(verbose, as_json=as_json) as report:
        file = Output(output, overwrite=overwrite)
        state = _download(list(dict.fromkeys(addresses)), given, report)
        user = plain(state.user)  # bytes are in hex there, and NaN is null
        file.write(state.tensors, {VERSION_KEY: str(state.version), USER_KEY: json.dumps(user)})
        count, nbytes = len(state.tensors), sum(tensor.nbytes for tensor in state.tensors.values())
        done = {"event": "done", "version": state.version, "tensors": count, "bytes": nbytes, "user": user}
        text = f"done: version {state.version}, {counted(count, 'tensor')}, {size(nbytes)}, wrote {output}"
        report.emit({**done, "output": str(output)}, text)


@click.command("export")
@click.argument("source", metavar="HOST:PORT|CHECKPOINT")
@options.path("--output", "DIR", "The folder to write; it must be new or empty.", required=True)
@options.model_folder_options
@download_options
def export_command(source: str, output: Path, config: Path | None, max_shard_bytes: int, **given: Any) -> None:
    r"""Writes the model of a run as a folder that from_pretrained of transformers reads.

    The weights are those of the state of the peer at HOST:PORT, or of a CHECKPOINT: a file that torch.save wrote, with
    the model's state_dict() itself or under "model" or "state_dict", or a safetensors file, such as that of
    `averaging state`. Prefixes of wrappers (torch.compile, DistributedDataParallel) are left out, and so is what
    belongs to the optimizer. The averager must have been made with model=model: otherwise its tensors have no names.

    A state has what the run trains. Frozen weights come from the folder of --config.

    \b
    Write the model of a running peer, or of a checkpoint:
      averaging export 192.0.2.7:4222 --config base --output model
      averaging export checkpoint.pt --config base --output model

    \b
    Events of --json, each with "event":
      started  version, tensors, bytes
      done     version (null for a checkpoint without one), tensors, bytes, frozen (tensors from --config), output
    """
    if config is None:
        raise click.UsageError("--config is missing: the folder of the base model, with config.json.")
    with reporting(given["verbose"], as_json=given["as_json"]) as report:
        base = BaseFolder(config, max_shard_bytes)
        check_place(output, folder=True)
        if output.exists() and any(output.iterdir()):
            raise InputError(f"{output} is not empty; remove it, or give another --output")
        if _is_file(source):
            tensors, version = read_checkpoint(Path(source))
        else:
            state = _download([str(options.JOINED.convert(source, None, None))], given, report)
            tensors, version = _model_of(state.tensors), str(state.version)
        metadata = {} if version is None else {VERSION_KEY: version}
        with base.written(output, tensors, metadata) as (temporary, written):
            temporary.rename(output)
            sync(output.absolute().parent)
        number = int(version) if version is not None and version.isdecimal() else None
        text = f"{'' if number is None else f'version {number}, '}{counted(written.tensors, 'tensor')}"
        of_config = f", {written.frozen} of them of --config" if written.frozen else ""
        text = f"done: {text}, {size(written.nbytes)}{of_config}, wrote {output}{'' if base.knows_names else UNCHECKED}"
        done = {"event": "done", "version": number, "tensors": written.tensors, "bytes": written.nbytes}
        report.emit({**done, "frozen": written.frozen, "output": str(output)}, text)


def _download(addresses: list[str], given: dict[str, Any], report: CommandOutput) -> State:
    """The state of one of the peers, which are looked up before."""
    from averaging.seeds import Seeds
    from averaging.state import StateLimits, download
    from averaging.transport.grpc import GrpcTransport

    credentials = options.credentials_of(given)
    source = addresses[0] if len(addresses) == 1 else f"one of {', '.join(addresses)}"
    reader: StateAssembler | None = None

    def describe() -> str:
        if reader is None:
            return f"downloading the state of {source}"
        return f"received {size(reader.received)} of {size(reader.nbytes)}"

    def on_progress(assembler: StateAssembler) -> None:
        nonlocal reader
        if reader is None:
            of_state = {"version": assembler.version, "tensors": assembler.count, "bytes": assembler.nbytes}
            text = f"{source} has version {assembler.version}: {counted(assembler.count, 'tensor')}"
            report.emit({"event": "started", **of_state}, f"{text}, {size(assembler.nbytes)}")
        reader = assembler

    async def fetch(_: Stop) -> State:
        seeds = Seeds(addresses, credentials)
        try:
            await seeds.look_up()
        finally:
            await seeds.close()
        if not seeds.addresses:
            raise CommandError(f"no peer to ask: {seeds.findings}")
        transport = GrpcTransport(
            None, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials, given=seeds.named, names=seeds.names
        )
        await transport.bind()
        try:
            limits, silence = StateLimits(given["max_bytes"]), given["timeout"]
            async with report.waiting(describe, line=False):
                loaded = await download(
                    transport, seeds.addresses, None, silence=silence, limits=limits, on_progress=on_progress
                )
                return loaded[0]
        finally:
            await transport.close()

    return run(fetch, when="; nothing was written")


def _is_file(source: str) -> bool:
    """Whether the source is a file and no address; a path that does not exist is an error of its own."""
    path = Path(source)
    if path.exists():
        return True
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors") or ":" not in source:
        raise InputError(f"{source} does not exist; give a checkpoint, or HOST:PORT of a peer")
    return False


def _model_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("buffer/"): tensor for name, tensor in tensors.items() if not name.startswith(OF_AVERAGER)
    }


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The model's tensors in a file, and its version if it has one."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; give a file that torch.save or safetensors wrote")
    if path.suffix == ".safetensors":
        document = read(path)
        return _model_of(document.tensors), (document.metadata or {}).get(VERSION_KEY)
    import pickle

    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0][:300]
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):  # torch advises to run its code
            code = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
            named = f" ({code[1]})" if code else ""
            reason = (
                f"it has more than tensors and plain values{named}, and loading them could run code; save "
                "the model's state_dict() alone where the file is trusted"
            )
        raise InputError(f"{path} cannot be read as a checkpoint of torch.save: {reason}") from None
    inside = loaded if isinstance(loaded, dict) else {}
    found = next((inside[key] for key in MODEL_KEYS if isinstance(inside.get(key), dict)), inside)
    tensors = {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    if not tensors:
        raise InputError(
            f"{path} has no model; save its state_dict() under 'model': "
            "torch.save({'model': model.state_dict(), 'averager': opt.state_dict()}, path)"
        )
    return tensors, None
