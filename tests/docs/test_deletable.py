"""Each room around the core can be deleted: the core does not import it, and stands without it."""

from pathlib import Path

import pytest

from tools.deletable import ROOMS, ROOT, check, copied, delete, imported, to_delete


def test_the_core_imports_no_room_around_it() -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "averaging").rglob("*.py")]
    imports = {path: frozenset(imported((ROOT / path).read_text())) for path in files if "wire" not in path.parts}
    for room in ROOMS:
        gone, broken = to_delete(imports, room)
        assert not broken
        assert any(path.is_relative_to(f"averaging/{room}") for path in gone)


def test_a_room_that_the_core_imports_is_named() -> None:
    imports = {
        Path("averaging/doctor/checks.py"): frozenset[str](),
        Path("averaging/peer/peer.py"): frozenset({"averaging.doctor.checks"}),
    }
    assert to_delete(imports, "doctor")[1] == ["averaging/peer/peer.py imports what goes with doctor"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("room", ROOMS)
def test_the_rest_stands_without_a_room(room: str, tmp_path: Path) -> None:
    copied(tmp_path)
    delete(tmp_path, room)
    check(tmp_path)
