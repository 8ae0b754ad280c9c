"""Tables for notebooks, which show an object by its `_repr_html_`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from averaging.observe.plain import printable


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """A table of names and values, whatever strangers may have written into them."""

    def cell(text: object) -> str:
        return escape(printable(str(text)))

    lines = "".join(f"<tr><th>{cell(name)}</th><td>{cell(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{cell(title)}</caption>{lines}</table>"
