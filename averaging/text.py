"""Text that others may have written, made fit for logs and terminals. Pure."""

from __future__ import annotations

MAX_TEXT = 4000
"""Characters of a message; what is longer is cut."""


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Text on one line, without what a terminal would obey, and no longer than `most` characters."""
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(map(_harmless, text))


def _harmless(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else "?"
