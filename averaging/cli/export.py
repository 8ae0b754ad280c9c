"""`averaging export`: writes the model of a run as `save_pretrained` does, from a peer's state or a checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import WRONG_USAGE, CommandError, Stop, Stopped, failure_of, run, stopped
from averaging.cli.files import beside, read, sync
from averaging.cli.model_folder import SHARD_BYTES, BaseFolder, write_folder, written_beside
from averaging.cli.options import (
    JOINED,
    CheckedPath,
    credentials_of,
    model_folder_options,
    output_options,
    security_options,
    state_download_options,
)
from averaging.cli.state import fetch_state
from averaging.common import VERSION_KEY, counted, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from averaging.cli.output import CommandOutput
    from averaging.state import State

UNCHECKED = "; --config has no weights, so the names and the number of tensors were not compared with a model"

OF_AVERAGER = ("optimizer/", "strategy/")
"""Prefixes of what a state has beside the model."""

MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
"""Where checkpoints have the model's state dict."""


@click.command("export")
@click.argument("source", metavar="HOST:PORT|CHECKPOINT")
@click.option("--output", type=CheckedPath(), required=True, metavar="DIR", help="The folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace --output if it is a folder of a model already.")
@model_folder_options
@state_download_options
@security_options
@output_options
def export_command(source: str, output: Path, *, as_json: bool, verbose: int, **given: Any) -> None:
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

    Exit codes: 0 done; 1 the download failed, the tensors are not those of the model, or they could not be written;
    2 wrong usage; 130, 143 stopped by a signal.

    \b
    Events of --json, each with "event":
      started  version, tensors, bytes
      done     version (null for a checkpoint without one), tensors, bytes, frozen (tensors from --config), output
      error    message
    """
    if given["config"] is None:
        raise click.UsageError("--config is missing: the folder of the base model, with config.json.")
    from averaging.cli.output import CommandOutput

    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        _export(source, output, given, report)


def _export(source: str, output: Path, given: dict[str, Any], report: CommandOutput) -> None:
    parts = BaseFolder(given["config"])
    _check_output(output, given["config"], overwrite=given["overwrite"])
    try:
        if _is_file(source):
            tensors, version = read_checkpoint(Path(source))
        else:
            state = _fetch(source, given, report)
            tensors, version = model_of(state.tensors), str(state.version)
        whole, frozen = parts.completed(tensors)
        metadata = {} if version is None else {VERSION_KEY: version}
        with written_beside(output) as temporary:
            write_folder(temporary, whole, parts, metadata, given["max_shard_bytes"] or SHARD_BYTES)
            _put(temporary, output)
    except Stopped as signal:
        raise stopped(signal.number, "; nothing was written") from None
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    number = int(version) if version is not None and version.isdecimal() else None
    text = f"done: {'' if number is None else f'version {number}, '}{counted(len(whole), 'tensor')}, {size(nbytes)}"
    of_config = f", {frozen} of them of --config" if frozen else ""
    report.emit(
        {
            "event": "done",
            "version": number,
            "tensors": len(whole),
            "bytes": nbytes,
            "frozen": frozen,
            "output": str(output),
        },
        f"{text}{of_config}, wrote {output}{'' if parts.knows_names else UNCHECKED}",
    )


def _is_file(source: str) -> bool:
    """Whether the source is a file and no address; a path that does not exist is an error of its own."""
    path = Path(source)
    if path.exists():
        return True
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors") or ":" not in source:
        raise CommandError(f"{source} does not exist; give a checkpoint, or HOST:PORT of a peer", WRONG_USAGE)
    return False


def _check_output(output: Path, config: Path, *, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise CommandError(f"{output} exists and is no directory; give another --output", WRONG_USAGE)
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise CommandError(
                f"{output} exists; give --overwrite to replace it, or another --output. Nothing was done", WRONG_USAGE
            )
        if not (output / "config.json").is_file():
            raise CommandError(
                f"{output} is no folder of a model, so it is not replaced; give another --output", WRONG_USAGE
            )
    if output.resolve() == config.resolve():
        raise CommandError("--output is the folder of --config; give another one", WRONG_USAGE)
    if not output.absolute().parent.is_dir():
        raise CommandError(f"there is no directory {output.absolute().parent}; create it first", WRONG_USAGE)


def _put(temporary: Path, output: Path) -> None:
    """Moves a complete folder to its place; an old one is moved away first and then removed."""
    old = output.rename(beside(output)) if output.exists() else None
    try:
        temporary.rename(output)
        sync(output.absolute().parent)
    except BaseException:  # also Ctrl+C: an old folder is back in its place
        if old is not None and not output.exists():
            old.rename(output)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _fetch(source: str, given: dict[str, Any], report: CommandOutput) -> State:
    from averaging.errors import AveragingError
    from averaging.seeds import Seeds

    try:
        address = JOINED.convert(source, None, None)
        credentials = credentials_of(given)
    except AveragingError as error:
        raise failure_of(error) from None
    seeds = Seeds([address], credentials)

    async def fetch(_: Stop) -> State:
        return await fetch_state(seeds, credentials, {**given, "verify_donors": 1}, report)

    return run(fetch)


def model_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the model in a state, under the names that they have there."""
    return {
        name.removeprefix("buffer/"): tensor for name, tensor in tensors.items() if not name.startswith(OF_AVERAGER)
    }


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The model's tensors in a file, and its version if it has one.

    Raises:
        CommandError: exit code 2: it cannot be read, or has no model.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a directory; give a file that torch.save or safetensors wrote", WRONG_USAGE)
    if path.suffix == ".safetensors":
        document = read(path)
        return model_of(document.tensors), (document.metadata or {}).get(VERSION_KEY)
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
        raise CommandError(f"{path} cannot be read as a checkpoint of torch.save: {reason}", WRONG_USAGE) from None
    inside = loaded if isinstance(loaded, dict) else {}
    found = next((inside[key] for key in MODEL_KEYS if isinstance(inside.get(key), dict)), inside)
    tensors = {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    if not tensors:
        raise CommandError(
            f"{path} has no model; save its state_dict() under 'model': "
            "torch.save({'model': model.state_dict(), 'averager': opt.state_dict()}, path)",
            WRONG_USAGE,
        )
    return tensors, None
