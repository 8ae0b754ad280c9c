"""Who is wrong if the options of the peers of a run differ."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from averaging.peer.run_progress import RunProgress

OWN, A, B, C = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1"


@pytest.mark.parametrize(
    ("differing", "alike", "given", "outvoted"),
    [
        ((A,), (), (A,), True),  # a newcomer beside the only peer that it knows
        ((A,), (), (), False),  # a stranger beside the peer that begins the run
        ((A, B), (), (), True),
        ((A,), (B,), (A,), False),
        ((A, B), (C,), (A,), True),
        ((A, B), (C,), (A, C), False),
    ],
)
def test_the_minority_is_wrong(
    differing: tuple[str, ...], alike: tuple[str, ...], given: tuple[str, ...], outvoted: bool
) -> None:
    assert RunProgress("run", OWN, Mock(), lambda: 0.0, given).is_outvoted(differing, alike) is outvoted
