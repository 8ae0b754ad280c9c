"""Failed joins of docs/operate/troubleshooting.md are provoked; the error says what the page says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.errors import JoinError
from averaging.peer import PeerContext
from averaging.security.ca import issue, make_authority
from tests.support.certificates import NOW, stored, token_file, write
from tests.support.pages import ROOT
from tests.support.peers import enter

PAGE = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
ENTRIES = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE))
"""Messages by what they are about; each has a cause and a remedy."""

MEANING = re.compile(
    r"'\w+'|\b(?:token|certificate|authority|expired|not valid yet|clocks|host|TLS|closed the connection|refused|name|"
    r"port|b\.example\.org|NTP|no other peer|none of them|did not answer|other machines)\b"
)
"""What carries the meaning of a message."""


def agree(page: str, error: str) -> bool:
    """Whether an error has all that carries the meaning of the page's message."""
    return set(MEANING.findall(page)) <= set(MEANING.findall(error))


def token(directory: Path, text: str) -> dict[str, Path]:
    """A file of tokens, as an option."""
    (directory / text).mkdir()
    return {"token_file": token_file(directory / text, text)}


def aged(directory: Path, days: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two peers, each with its own clock: the certificate of one was issued so many days ago, for one day."""
    run = make_authority("run", NOW - timedelta(days=5), 10)

    def options(age: float) -> dict[str, Any]:
        issued = issue(run, "peer", ("127.0.0.1",), NOW - timedelta(days=age), 1)
        return {
            **stored(directory / str(age), run, issued),
            "context": PeerContext(clock=lambda: time.time() - age * 86400),
        }

    return options(days), options(0)


RUN, RIGHT, WRONG = {"run_id": "demo"}, "0123456789abcdef", "fedcba9876543210"

JOINS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "Another run": lambda _: (RUN, {"run_id": "other"}),
    "No token": lambda path: (token(path, RIGHT), {}),
    "A token at this peer only": lambda path: ({}, token(path, RIGHT)),
    "A wrong token": lambda path: (token(path, RIGHT), token(path, WRONG)),
    "Another authority": lambda path: (write(path / "foreign", "127.0.0.1", of="foreign"), write(path, "127.0.0.1")),
    "An expired certificate": lambda path: aged(path, 3),
    "A certificate that is not valid yet": lambda path: aged(path, -3),
    "A certificate for another host": lambda path: (
        write(path, "localhost") | {"listen": "localhost:0"},
        write(path, "127.0.0.1"),
    ),
    "The other peer does not speak TLS": lambda path: ({}, write(path, "127.0.0.1")),
    "The other peer hangs up": lambda path: (write(path, "127.0.0.1"), {}),
}
"""Options of the peer that is up, and of the one that joins it."""

NOT_DEFINITE = {"The other peer hangs up"}


@pytest.mark.parametrize("entry", JOINS)
async def test_a_join_fails_as_the_page_says(entry: str, tmp_path: Path) -> None:
    listens, joins = JOINS[entry](tmp_path)
    async with AsyncExitStack() as stack:
        first = await enter(stack, {"w": torch.zeros(1)}, **{"run_id": "demo", **listens})
        seed = f"127.0.0.1:{first.endpoint.rpartition(':')[2]}"
        with pytest.raises(JoinError) as raised:
            await enter(
                stack,
                {"w": torch.zeros(1)},
                join=[seed],
                **{"run_id": "demo", "join_timeout": 2.0 if entry in NOT_DEFINITE else 60.0} | joins,
            )
    assert raised.value.refused is (entry not in NOT_DEFINITE)
    assert agree(ENTRIES[entry], str(raised.value)), raised.value


def test_every_entry_has_message_cause_and_remedy() -> None:
    assert PAGE.count("\n| ") == len(ENTRIES) + PAGE.count("\n| what |")
