"""The code of docs/how-to/testing.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing.md"


def test_the_code_of_the_page_runs_and_gives_what_it_says() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert [tensor.tolist() for tensor in names["tensors"]] == [[3.0] * 4, [3.0] * 4, [1.0] * 4]
