"""A token that the processes of one user share on one machine, so that a service on loopback is not open to others."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from averaging.errors import ConfigError
from averaging.security.credentials import Credentials, read_tokens


def local_credentials(service: str) -> Credentials:
    """The credentials of a service whose user gives none: the token in `token_path`, which is made if it is missing.

    Raises:
        ConfigError: the file cannot be made or read, or other users can read it.
    """
    try:
        file = token_path(service)
        if not file.exists():
            _make(file)
        status = file.stat()
    except (OSError, RuntimeError) as error:  # the user may have no home
        raise ConfigError(
            f"the token that {service} of one user share cannot be made: {error}; set XDG_STATE_HOME to a folder of "
            "your own, or give credentials"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{file} belongs to another user or can be read by others; delete it and start again")
    return Credentials(tokens=read_tokens(file))


def token_path(service: str) -> Path:
    """The file with the token of a service: in $XDG_STATE_HOME, by default ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "averaging" / f"{service}.token"


def _make(file: Path) -> None:
    """Makes the file in one step, so that of several processes that start at once all read the same token."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = file.with_suffix(f".{secrets.token_hex(8)}")
    try:
        mine.touch(mode=0o600, exist_ok=False)
        mine.write_text(f"{secrets.token_hex(32)}\n")
        with suppress(FileExistsError):
            os.link(mine, file)
    finally:
        mine.unlink(missing_ok=True)
