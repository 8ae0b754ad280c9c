"""The token that processes of one user share."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from averaging.errors import ConfigError
from averaging.security.credentials import local_credentials, token_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_all_processes_that_start_at_once_get_the_same_token() -> None:
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(local_credentials, ["workers"] * 16))
    [credentials] = found
    [token] = credentials.tokens
    assert len(token) == 64
    assert local_credentials("other").tokens != credentials.tokens
    assert sorted(one.name for one in token_path("workers").parent.iterdir()) == ["other.token", "workers.token"]


def test_only_this_user_can_read_it() -> None:
    local_credentials("workers")
    file = token_path("workers")
    assert [stat.S_IMODE(one.stat().st_mode) for one in (file, file.parent)] == [0o600, 0o700]
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others; delete it"):
        local_credentials("workers")
