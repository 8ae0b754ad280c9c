"""Failed joins of docs/operate/troubleshooting.md are provoked; the error says what the page says."""

import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.errors import JoinError
from tests.support.certificates import token_file, write
from tests.support.pages import ROOT
from tests.support.peers import enter

PAGE = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
ENTRIES = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE))
"""Messages by what they are about; each has a cause and a remedy."""

MEANING = re.compile(r"'\w+'|\b(?:token|certificate|authority|clocks|host|TLS|refused|name|port)\b")
"""What carries the meaning of a message."""


def agree(page: str, error: str) -> bool:
    """Whether an error has all that carries the meaning of the page's message."""
    return set(MEANING.findall(page)) <= set(MEANING.findall(error))


def token(directory: Path, text: str) -> dict[str, Path]:
    """A file of tokens, as an option."""
    (directory / text).mkdir()
    return {"token_file": token_file(directory / text, text)}


RUN, RIGHT, WRONG = {"run_id": "demo"}, "0123456789abcdef", "fedcba9876543210"

JOINS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "Another run": lambda _: (RUN, {"run_id": "other"}),
    "No token": lambda path: (token(path, RIGHT), {}),
    "A token at this peer only": lambda path: ({}, token(path, RIGHT)),
    "A wrong token": lambda path: (token(path, RIGHT), token(path, WRONG)),
    "Another authority": lambda path: (write(path / "foreign", "127.0.0.1", of="foreign"), write(path, "127.0.0.1")),
}
"""Options of the peer that is up, and of the one that joins it."""


@pytest.mark.parametrize("entry", JOINS)
async def test_a_join_fails_as_the_page_says(entry: str, tmp_path: Path) -> None:
    listens, joins = JOINS[entry](tmp_path)
    async with AsyncExitStack() as stack:
        first = await enter(stack, {"w": torch.zeros(1)}, **{"run_id": "demo", **listens})
        seed = f"127.0.0.1:{first.endpoint.rpartition(':')[2]}"
        with pytest.raises(JoinError) as raised:
            await enter(stack, {"w": torch.zeros(1)}, join=[seed], **{"run_id": "demo", "join_timeout": 60.0} | joins)
    assert raised.value.refused
    assert agree(ENTRIES[entry], str(raised.value)), raised.value


def test_every_entry_has_message_cause_and_remedy() -> None:
    assert PAGE.count("\n| ") == len(ENTRIES) + PAGE.count("\n| what |")
