"""The safetensors files of the command line: read and checked before anything starts, written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from averaging.cli.atomic_files import beside, replaced_atomically
from averaging.cli.error_reporting import NOT_DONE, WRONG_USAGE, CommandError
from averaging.common.shared_tensors import all_finite
from averaging.protocol.schema import DTYPES

RESERVED_NAME = "__metadata__"
"""A tensor of this name makes a safetensors file that nobody can read."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a safetensors file holds.

    Attributes:
        tensors: by name, sorted by name: the format keeps no order, and all peers must have the same one.
        metadata: texts by name; None if the file has none.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] | None


def read(path: Path) -> Document:
    """Reads a file into memory of its own, so that the file may change or go afterwards.

    Raises:
        Failure: with exit code 2, if it is not there, is no safetensors file, or is not whole.
    """
    if not path.exists():
        raise CommandError(f"{path} does not exist; give a file written by safetensors.torch.save_file", WRONG_USAGE)
    if not path.is_file():
        raise CommandError(f"{path} is not a file; give one written by safetensors.torch.save_file", WRONG_USAGE)
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the system takes any bytes for a name, safetensors does not
        raise CommandError(
            f"{path} cannot be read: its name is not valid UTF-8; rename it, or the directory", WRONG_USAGE
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
            return Document(tensors, file.metadata())
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CommandError(
            f"{path} cannot be read as a safetensors file ({error}); if it was copied, copy it again, otherwise write "
            "it with safetensors.torch.save_file",
            WRONG_USAGE,
        ) from None


def check_can_be_averaged(path: Path, tensors: Mapping[str, torch.Tensor], *, allow_non_finite: bool) -> None:
    """Looks for what a round would refuse.

    Raises:
        Failure: with exit code 2; it names the tensors.
    """
    if not tensors:
        raise CommandError(f"{path} holds no tensors; there is nothing to average", WRONG_USAGE)
    wrong = [f"{name!r} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES.values()]
    if wrong:
        raise CommandError(
            f"{path}: {_listed(wrong)} cannot be averaged; {', '.join(DTYPES)} can. Leave such tensors out of the "
            "file, or convert them",
            WRONG_USAGE,
        )
    broken = [repr(name) for name, tensor in tensors.items() if not all_finite(tensor)]
    if broken and not allow_non_finite:
        raise CommandError(
            f"{path}: {_listed(broken)} holds NaN or infinity; repair the file, or give --allow-non-finite and let it "
            "spread to all members",
            WRONG_USAGE,
        )


class NotWrittenError(CommandError):
    """The disk is full, or fails: what was there before is untouched, and a later attempt may succeed."""


class Output:
    """A file to be written later; whether that can work is found out now, before any work is done for it.

    Args:
        path: where to write; a link is followed.
        overwrite: whether the file may exist.

    Raises:
        Failure: with exit code 2, if the file exists, or cannot be written there.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        self._target = path.resolve()
        self._may_exist = overwrite
        if self._target.exists() and not self._target.is_file():
            raise CommandError(f"{path} exists and is not a file; give --output another name", WRONG_USAGE)
        if self._target.exists() and not overwrite:
            raise CommandError(
                f"{path} exists; give --overwrite to replace it, or --output another name. Nothing was done",
                WRONG_USAGE,
            )
        if not self._target.parent.is_dir():
            raise CommandError(f"there is no directory {self._target.parent}; make it first", WRONG_USAGE)
        self._mode = self._try_to_write()

    def _try_to_write(self) -> int:
        """The permissions the file is to have: its present ones, or those of a new file."""
        probe = beside(self._target)
        try:
            with probe.open("xb"):
                pass
            mode = (self._target if self._target.exists() else probe).stat().st_mode
            probe.unlink()
        except OSError as error:
            raise CommandError(
                f"{self.path} cannot be written ({error.strerror}); choose a directory in which files can be made, "
                "and a shorter name if it is too long",
                WRONG_USAGE,
            ) from None
        return mode & 0o777

    def write(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> None:
        """Writes the file whole, so that after a crash at any moment there is the old one or the new one.

        Raises:
            NotWrittenError: it cannot be written now.
            Failure: somebody else has made such a file meanwhile, or a name is reserved.
        """
        if RESERVED_NAME in tensors:
            raise CommandError(
                f"{self.path} was not written: the format allows no tensor called {RESERVED_NAME!r}", NOT_DONE
            )
        try:
            with replaced_atomically(self._target) as temporary:
                save_file(dict(tensors), temporary, dict(metadata) if metadata else None)
                temporary.chmod(self._mode)
                if self._target.exists() and not self._may_exist:
                    kept = temporary.rename(beside(self._target))
                    raise CommandError(
                        f"{self.path} was made by somebody else meanwhile; the result is in {kept}", NOT_DONE
                    )
        except (OSError, SafetensorError) as error:
            raise NotWrittenError(
                f"{self.path} could not be written: {error}; what was there before is untouched. Make room there, "
                "or give --output another place",
                NOT_DONE,
            ) from None
        self._may_exist = True


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names[:3])}{more}"
