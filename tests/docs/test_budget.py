"""The budget of `make lint`: what goes over it is named, and it only falls."""

import tomllib
from pathlib import Path

from tools.budget import count, lowered, over, spelled


def write(root: Path, name: str, lines: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("line\n" * lines)


def test_a_room_that_has_grown_is_named_and_a_bound_only_falls(tmp_path: Path) -> None:
    for name, lines in {"averaging/rl/feed/a.py": 5, "averaging/peer/b.py": 7, "averaging/top.py": 2}.items():
        write(tmp_path, name, lines)
    write(tmp_path, "docs/page.md", 3)
    allowed = count(tmp_path)
    assert allowed["rooms"] == {"front": 2, "peer": 7, "rl/feed": 5}
    assert (allowed["all"]["lines"], allowed["all"]["files"], allowed["all"]["page_lines"]) == (14, 3, 3)
    assert tomllib.loads(spelled(allowed)) == allowed
    assert over(allowed, allowed) == []

    write(tmp_path, "averaging/rl/feed/a.py", 6)
    write(tmp_path, "averaging/peer/b.py", 4)
    write(tmp_path, "averaging/watcher/c.py", 1)  # a room without a budget
    found = count(tmp_path)
    assert over(found, allowed) == [
        "rooms rl/feed: 6, allowed 5",
        "rooms watcher: 1, allowed 0",
        "all files: 4, allowed 3",
    ]
    fallen = lowered(found, allowed)
    assert fallen["rooms"] == {"front": 2, "peer": 4, "rl/feed": 5, "watcher": 0}
    assert fallen["all"]["lines"] == 13
