"""What the soak test takes for sound."""

from __future__ import annotations

import pytest

from tests.soak import is_sound

GATHERED = {"a:1": 0.0, "b:1": 2.0, "c:1": 10.0}


@pytest.mark.parametrize(
    ("values", "kept_local", "sound"),
    [
        ([4.0], 0, True),
        ([1.0, 4.0], 0, True),  # one member was lost on the way
        ([3.0], 0, False),
        ([4.0, 3.0], 5, False),
        ([4.0, 7.0], 5, True),  # the own value, where the reducer was lost
        ([4.0, 7.0], 0, False),
    ],
)
def test_only_averages_of_members_are_sound(values: list[float], kept_local: int, sound: bool) -> None:
    assert is_sound(values, GATHERED, 7.0, kept_local) == sound
