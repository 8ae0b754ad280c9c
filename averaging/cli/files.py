"""The files of commands: safetensors files and folders of models, checked before the work and replaced atomically.

`Document` is a file that was read, `Output` one that is written. `BaseFolder` decides what belongs in the folder of a
model, as `save_pretrained` of transformers writes it; `VersionedFolders` keeps the newest versions side by side.

Nothing here imports torch before a safetensors file is read or written, so that `averaging ca` starts fast.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from averaging.cli.running import CommandError, InputError
from averaging.common import (
    ADAPTER_CONFIG,
    ADAPTER_ERROR,
    ADAPTER_FILE,
    is_placeholder,
    listed,
    split_adapter,
    without_wrappers,
)
from averaging.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

logger = logging.getLogger("averaging.cli")


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. On exit it is synced and moved to `path`, or removed after an error."""
    temporary = beside(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


RESERVED_NAME = "__metadata__"  # a tensor of this name would make a safetensors file unreadable


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a safetensors file."""

    # tensors by name, sorted by name: the format has no order, and all peers need the same one
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] | None  # text values by name; None if the file has none
    # tensors that are not averaged; the output has them as they are
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def divided(self, path: Path, only: Sequence[str], exclude: Sequence[str]) -> Document:
        """The same content, where tensors of integers and those that the user did not choose are kept as they are.

        `only` has patterns of the names to average, such as `*.lora_*`, empty for all; `exclude` of those to keep.
        """
        for option, pattern in [*(("--only", name) for name in only), *(("--exclude", name) for name in exclude)]:
            if not any(fnmatchcase(name, pattern) for name in self.tensors):
                first = next(iter(self.tensors), "")
                raise InputError(f"{option} {pattern!r} matches no tensor of {path}, whose first one is {first!r}")

        def is_averaged(name: str, tensor: torch.Tensor) -> bool:
            chosen = not only or any(fnmatchcase(name, pattern) for pattern in only)
            is_integer = not (tensor.is_floating_point() or tensor.is_complex())
            return chosen and not is_integer and not any(fnmatchcase(name, pattern) for pattern in exclude)

        averaged = {name: tensor for name, tensor in self.tensors.items() if is_averaged(name, tensor)}
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in averaged}
        return Document(averaged, self.metadata, kept)


def read(path: Path, *, copy: bool = True) -> Document:
    """Reads a file into memory, so that it may be changed or removed afterwards; without `copy` it must stay."""
    from safetensors import SafetensorError, safe_open

    save = "safetensors.torch.save_file"
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}; give one that {save} wrote")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}  # mapped from the file
            return Document({n: t.clone() if copy else t for n, t in tensors.items()}, file.metadata())
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path} cannot be read as a safetensors file ({error}); if it was copied, copy it again, otherwise write "
            f"it with {save}"
        ) from None


def check_can_be_averaged(path: Path, tensors: Mapping[str, torch.Tensor], *, allow_non_finite: bool) -> None:
    """Checks that a round would accept the tensors; an error names those that it would not."""
    from averaging.tensors import AVERAGED_DTYPES, all_finite

    if not tensors:
        raise InputError(f"{path} contains no tensors to average, apart from integers and excluded ones")
    wrong = [
        f"{name!r} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in AVERAGED_DTYPES.values()
    ]
    if wrong:
        raise InputError(
            f"{path}: {_named(wrong)} cannot be averaged; {', '.join(AVERAGED_DTYPES)} can. Leave them out with "
            "--exclude, or convert them"
        )
    if allow_non_finite:
        return
    if broken := [repr(name) for name, tensor in tensors.items() if not all_finite(tensor)]:
        raise InputError(
            f"{path}: {_named(broken)} has NaN or infinity; repair the file, or give --non-finite allow to spread it "
            "to all members"
        )


class NotWrittenError(CommandError):
    """The file could not be written, for example because the disk is full. The old file is unchanged."""


def check_place(path: Path, *, folder: bool, overwrite: bool = True) -> None:
    """Checks that a file or a folder can be at a path, and is not there if it must not be overwritten."""
    if path.exists():
        if not (path.is_dir() if folder else path.is_file()):
            what = "is no directory" if folder else "is not a file"
            raise InputError(f"{path} exists and {what}; give another --output")
        if not overwrite:
            raise InputError(f"{path} exists; give --overwrite to replace it, or another --output. Nothing was done")
    if not path.absolute().parent.is_dir():
        raise InputError(f"there is no directory {path.absolute().parent}; create it first")


class Output:
    """A file that will be written later. The constructor checks that it can be written, before any work is done.

    A link is followed.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        self._target = path.resolve()
        check_place(self._target, folder=False, overwrite=overwrite)
        self._mode = self._try_to_write()

    def _try_to_write(self) -> int:
        # Writes a probe, and returns the permissions for the file: its present ones, or those of a new file.
        probe = beside(self._target)
        try:
            with probe.open("xb"):
                pass
            mode = (self._target if self._target.exists() else probe).stat().st_mode
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written ({error.strerror}); choose a writable directory, or a shorter name if "
                "it is too long"
            ) from None
        return mode & 0o777

    def write(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> None:
        """Writes the file atomically: after a crash, or a NotWrittenError, there is the old file or the new one."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if RESERVED_NAME in tensors:
            raise CommandError(f"{self.path} was not written: the format allows no tensor called {RESERVED_NAME!r}")
        try:
            with replaced_atomically(self._target) as temporary:
                save_file(dict(tensors), temporary, dict(metadata) if metadata else None)
                temporary.chmod(self._mode)
        except (OSError, SafetensorError) as error:
            raise NotWrittenError(
                f"{self.path} could not be written: {error}; the old file is unchanged. Free disk space, or give "
                "another --output"
            ) from None


def _named(names: list[str]) -> str:
    return f"{'tensor' if len(names) == 1 else 'tensors'} {listed(names)}"


# Folders of models.

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Ends of the names of files that hold weights of the old model, or say where they are: they are not copied."""


@dataclass(frozen=True, slots=True)
class WrittenFolder:
    tensors: int
    frozen: int
    nbytes: int
    error: float  # of an adapter that was cut to a rank, see `ADAPTER_ERROR`


class BaseFolder:
    """What a model folder has beside the weights of the run: the files and the frozen weights of another folder.

    Args:
        folder: a model's folder with `config.json`, as `save_pretrained` writes it, with or without its weights.
        shard_bytes: limit of a file with weights.
    """

    error = 0.0  # see `WrittenFolder`

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self._shard_bytes = folder, shard_bytes
        if not folder.is_dir():
            raise InputError(f"--config: there is no directory {folder}")
        if not (folder / "config.json").is_file():
            raise InputError(
                f"--config: {folder} has no config.json; give the folder of the base model, as save_pretrained writes "
                "it or the Hub has it"
            )
        try:
            files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and _is_inside(path)]
            self.copied = [path for path in files if not path.name.endswith(WEIGHT_FILES)]
            self._places = _places([path for path in files if path.name.endswith(".safetensors")])
        except OSError as error:
            raise InputError(f"--config: {folder} cannot be read: {error}") from None
        if folder / "config.json" not in self.copied:
            raise InputError(f"--config: config.json in {folder} is a link that leads out of it")

    @property
    def knows_names(self) -> bool:
        return bool(self._places)

    def completed(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        """The tensors of the whole model under its own names, and how many of them are those of the folder.

        The prefixes of wrappers are left out. If the folder has weights, they say which tensors the model has: those
        that are missing, since the run does not train them, are taken from there; copies of tied ones are left out.
        """
        named = dict(zip(without_wrappers(tensors), tensors.values(), strict=True))
        if nameless := next((name for name in named if is_placeholder(name)), None):
            raise CommandError(
                f"the tensors have no names of a model, such as {nameless!r}: the averager was made without its model. "
                "Give it model=model, or publish the model's state_dict()",
            )
        if adapter := next((name for name in named if ".lora_" in name), None):
            raise CommandError(
                f"{adapter!r} belongs to an adapter, not to the model. Write it in the script, with "
                "strategy.save_adapter(folder) or strategy.merge(), or use `averaging follow`: with --layout peft if "
                "the run publishes strategy.adapter_view(rank=…), else publish strategy.merged_view()"
            )
        if RESERVED_NAME in named:
            raise CommandError(f"the format allows no tensor called {RESERVED_NAME!r}")
        if not self._places:
            return named, 0
        ours = {name: tensor for name, tensor in named.items() if name in self._places}
        for name in ours:
            shape = self._places[name][1]
            if list(ours[name].shape) != shape:
                raise CommandError(
                    f"{name!r} is {list(ours[name].shape)}, and {shape} in {self.folder}; give --config the folder of "
                    "the model that is trained"
                )
        missing = [name for name in self._places if name not in ours]
        whole = ours | self._read(missing)
        for name, tensor in named.items():
            if name not in whole and not _is_tied(tensor, whole):
                raise CommandError(
                    f"{listed([name])!r} is no tensor of the model in {self.folder}, whose first one is "
                    f"{next(iter(self._places))!r}; give --config the folder of the model that is trained"
                )
        return whole, len(missing)

    def _read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        read: dict[str, torch.Tensor] = {}
        try:
            for path in dict.fromkeys(self._places[name][0] for name in names):
                with safe_open(path, framework="pt") as file:
                    read |= {name: file.get_tensor(name) for name in names if self._places[name][0] == path}
        except (SafetensorError, OSError) as error:
            raise CommandError(f"--config: {self.folder} cannot be read: {error}") from None
        return read

    @contextmanager
    def written(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> Iterator[tuple[Path, WrittenFolder]]:
        """Yields a complete folder, synced to the disk, under a temporary name beside `folder`, to be moved there."""
        from safetensors import SafetensorError

        whole, frozen = self.completed(tensors)
        temporary = beside(folder)
        try:
            self._write(temporary, whole, metadata)
            nbytes = sum(tensor.nbytes for tensor in whole.values())
            yield temporary, WrittenFolder(len(whole), frozen, nbytes, self.error)
        except (OSError, SafetensorError) as error:
            raise NotWrittenError(
                f"{folder} could not be written: {error}; the old version is unchanged. Free disk space, or give "
                "another --output"
            ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write(self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        folder.mkdir()
        self._write_weights(folder, tensors, metadata)
        for path in self.copied:
            shutil.copyfile(path, folder / path.name)
        for path in (*folder.iterdir(), folder):
            sync(path)

    def _write_weights(self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        from safetensors.torch import save_file

        divided = shards(tensors, self._shard_bytes)
        for name, group in divided.items():
            whole = {key: tensor.contiguous() for key, tensor in group.items()}
            save_file(whole, folder / name, {"format": "pt", **metadata})
        if len(divided) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
                "weight_map": {key: name for name, group in divided.items() for key in group},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class AdapterFolder(BaseFolder):
    """What a folder of peft has, as `save_pretrained` writes it: an adapter, and nothing of its base."""

    def __init__(self) -> None:
        self.copied: list[Path] = []

    def completed(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        try:
            self._config, adapter = split_adapter(tensors)
        except TensorError as error:
            raise CommandError(str(error)) from None
        self.error = float(self._config.pop(ADAPTER_ERROR, 0))
        return adapter, 0

    def _write_weights(self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        from safetensors.torch import save_file

        said = {"format": "pt", **metadata, ADAPTER_ERROR: str(self.error)}
        save_file(dict(tensors), folder / ADAPTER_FILE, said)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._config, indent=2, sort_keys=True) + "\n")


def _is_inside(path: Path) -> bool:
    """Whether it is a file of its folder, and no link that leads elsewhere, but to the blobs of the Hub's cache."""
    folder, target = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    inside = target.is_relative_to(folder) or target.parent == blobs
    if path.is_file() and not inside:
        logger.warning("%s is a link that leads out of the folder, so it is neither read nor copied", path)
    return path.is_file() and inside


def _places(paths: Sequence[Path]) -> dict[str, tuple[Path, list[int]]]:
    from safetensors import SafetensorError, safe_open

    places: dict[str, tuple[Path, list[int]]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                places |= {name: (path, file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"--config: {path} is no safetensors file: {error}") from None
    return places


def _is_tied(tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor has the values of another one, as the output layer of a model with tied embeddings does."""
    import torch

    return any(
        other.shape == tensor.shape and other.dtype == tensor.dtype and torch.equal(other, tensor)
        for other in others.values()
    )


def shards(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, dict[str, torch.Tensor]]:
    """Divides tensors, in order, between files of at most `limit` bytes, by the names that transformers gives them.

    A tensor that is larger has a file of its own.
    """
    groups: list[dict[str, torch.Tensor]] = []
    left = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > left:
            groups.append({})
            left = limit
        groups[-1][name] = tensor
        left -= tensor.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


NEWEST = "newest"  # the link to the newest version
_VERSION = re.compile(r"version-(\d+)")
_LEFTOVER = re.compile(r"\.(version-\d+|newest)\.[0-9a-f]{8}\.tmp")


class VersionedFolders:
    """A directory with the newest versions of a model, `version-N` each, and the link `newest` to the last one.

    A folder appears complete under its name, and the link moves in one step, so a reader that follows the link finds
    the old version or the new one. Whoever reads an older version can go on: it is removed only after
    `keep` newer ones.

    Args:
        path: the directory; it is made if it is missing.
        base: what each folder has beside the weights.
        keep: versions that are kept.
    """

    def __init__(self, path: Path, base: BaseFolder, keep: int) -> None:
        self.path, self._base, self._keep = path, base, keep
        try:
            check_place(path, folder=True)
            path.mkdir(exist_ok=True)
            if strange := sorted(entry.name for entry in path.iterdir() if not _is_ours(entry)):
                text = f"{path} has {listed(strange)}, which this command has not written; give another --output"
                raise InputError(f"{text}. Nothing was done")
            probe = beside(path / NEWEST)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}); choose a writable directory") from None
        self._remove_leftovers()

    @property
    def newest(self) -> Path | None:
        link = self.path / NEWEST
        return link.resolve() if link.is_symlink() and link.is_dir() else None

    def write(
        self, version: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> tuple[Path, WrittenFolder]:
        """Writes a version, moves the link, and removes versions that are too old. Returns the version's folder."""
        folder = self.path / f"version-{version}"
        with self._base.written(folder, tensors, metadata) as (temporary, written):
            if folder.exists():
                self._remove(folder)
            temporary.rename(folder)
            self._move_link(folder)
        for old in self._versions()[: -self._keep]:
            if old != folder:
                self._remove(old)
        return folder, written

    def _move_link(self, folder: Path) -> None:
        link = beside(self.path / NEWEST)
        link.symlink_to(folder.name)
        try:
            link.replace(self.path / NEWEST)
        finally:
            link.unlink(missing_ok=True)
        sync(self.path)

    def _versions(self) -> list[Path]:  # the oldest first
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _VERSION.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def _remove(self, folder: Path) -> None:
        # Under another name, so that nobody finds half of it under its own.
        hidden = beside(folder)
        with suppress(OSError):
            folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        # What a process that was killed has left.
        for entry in self.path.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)


def _is_ours(entry: Path) -> bool:
    if entry.name == NEWEST:
        return entry.is_symlink()
    return bool(_VERSION.fullmatch(entry.name) or _LEFTOVER.fullmatch(entry.name))
