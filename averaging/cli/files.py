"""The files of commands: safetensors files, checked before the peer starts, and files that are replaced atomically.

Nothing here imports torch before a safetensors file is read or written, so that `averaging ca` starts fast.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from averaging.cli.failure import WRONG_USAGE, CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. On exit it is synced and moved to `path`, or removed after an error.

    Raises:
        OSError: the file cannot be moved.
    """
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


RESERVED_NAME = "__metadata__"
"""A tensor of this name would make a safetensors file unreadable."""


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

        Args:
            path: path of the file, for errors.
            only: patterns, such as `*.lora_*`, of the names to average; empty for all.
            exclude: patterns of names to keep.

        Raises:
            CommandError: exit code 2: a pattern matches no name.
        """
        for option, pattern in [*(("--only", name) for name in only), *(("--exclude", name) for name in exclude)]:
            if not any(fnmatchcase(name, pattern) for name in self.tensors):
                first = next(iter(self.tensors), "")
                raise CommandError(
                    f"{option} {pattern!r} matches no tensor of {path}, whose first one is {first!r}", WRONG_USAGE
                )

        def is_averaged(name: str, tensor: torch.Tensor) -> bool:
            chosen = not only or any(fnmatchcase(name, pattern) for pattern in only)
            is_integer = not (tensor.is_floating_point() or tensor.is_complex())
            return chosen and not is_integer and not any(fnmatchcase(name, pattern) for pattern in exclude)

        averaged = {name: tensor for name, tensor in self.tensors.items() if is_averaged(name, tensor)}
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in averaged}
        return Document(averaged, self.metadata, kept)


def read(path: Path, *, shapes_only: bool = False) -> Document:
    """Reads a file into memory, so that it may be changed or removed afterwards.

    Args:
        path: the file.
        shapes_only: reads names, dtypes and shapes only: the tensors are zeros that take no memory.

    Raises:
        CommandError: exit code 2: the file does not exist, is incomplete, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    save = "safetensors.torch.save_file"
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise CommandError(f"{path} {what}; give one that {save} wrote", WRONG_USAGE)
    try:
        with safe_open(path, framework="pt") as file:
            tensor_of = _shape_of if shapes_only else _tensor_of
            return Document({name: tensor_of(file, name) for name in sorted(file.keys())}, file.metadata())
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CommandError(
            f"{path} cannot be read as a safetensors file ({error}); if it was copied, copy it again, otherwise write "
            f"it with {save}",
            WRONG_USAGE,
        ) from None


def _tensor_of(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name).clone()
    return tensor


def _shape_of(file: Any, name: str) -> torch.Tensor:
    """A tensor of zeros that takes no memory."""
    import torch

    view = file.get_slice(name)
    code = view.get_dtype()
    kind, _, form = code.partition("_")
    word = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}.get(kind.rstrip("0123456789"))
    dtype = torch.bool if code == "BOOL" else getattr(torch, f"{word}{kind.lstrip('BCFIU')}", None)
    if dtype is None or form:
        raise ValueError(f"tensor {name!r} has the dtype {code}, which cannot be averaged")
    return torch.zeros((), dtype=dtype).expand(view.get_shape())


def check_can_be_averaged(path: Path, tensors: Mapping[str, torch.Tensor], *, allow_non_finite: bool) -> None:
    """Checks that a round would accept the tensors.

    Raises:
        CommandError: exit code 2; the message names the tensors.
    """
    from averaging.tensors import AVERAGED_DTYPES, all_finite

    if not tensors:
        raise CommandError(f"{path} contains no tensors to average, apart from integers and excluded ones", WRONG_USAGE)
    wrong = [
        f"{name!r} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in AVERAGED_DTYPES.values()
    ]
    if wrong:
        raise CommandError(
            f"{path}: {_listed(wrong)} cannot be averaged; {', '.join(AVERAGED_DTYPES)} can. Leave them out with "
            "--exclude, or convert them",
            WRONG_USAGE,
        )
    broken = [repr(name) for name, tensor in tensors.items() if not all_finite(tensor)]
    if broken and not allow_non_finite:
        raise CommandError(
            f"{path}: {_listed(broken)} has NaN or infinity; repair the file, or give --non-finite allow to spread it "
            "to all members",
            WRONG_USAGE,
        )


class NotWrittenError(CommandError):
    """The file could not be written, for example because the disk is full. The old file is unchanged."""


def check_place(path: Path, *, folder: bool, overwrite: bool = True) -> None:
    """Checks that a file or a folder can be at a path.

    Raises:
        CommandError: exit code 2: something else is there, or it exists and must not be overwritten.
    """
    if path.exists():
        if not (path.is_dir() if folder else path.is_file()):
            what = "is no directory" if folder else "is not a file"
            raise CommandError(f"{path} exists and {what}; give another --output", WRONG_USAGE)
        if not overwrite:
            raise CommandError(
                f"{path} exists; give --overwrite to replace it, or another --output. Nothing was done", WRONG_USAGE
            )
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory {path.absolute().parent}; create it first", WRONG_USAGE)


class Output:
    """A file that will be written later. The constructor checks that it can be written, before any work is done.

    Args:
        path: where to write; a link is followed.
        overwrite: whether the file may exist.

    Raises:
        CommandError: exit code 2: the file exists, or cannot be written there.
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
            raise CommandError(
                f"{self.path} cannot be written ({error.strerror}); choose a writable directory, or a shorter name if "
                "it is too long",
                WRONG_USAGE,
            ) from None
        return mode & 0o777

    def write(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> None:
        """Writes the file atomically: after a crash there is either the old file or the new one.

        Raises:
            NotWrittenError: the file cannot be written now.
            CommandError: a tensor has the reserved name.
        """
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names[:3])}{more}"
