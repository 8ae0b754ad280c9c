"""Who is wrong if the options of the peers of a run differ."""

from unittest.mock import Mock

import pytest

from averaging.peer.run_progress import RunProgress

OWN, FIRST, SECOND = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"
STRANGER = ("198.51.100.9:1", "198.51.100.9:2", "198.51.100.9:3")  # several records of one host


@pytest.mark.parametrize(
    ("differing", "alike", "given", "outvoted"),
    [
        ((FIRST,), (), (FIRST,), True),  # a newcomer beside the only peer that it knows
        ((FIRST,), (), (), False),  # a stranger beside the peer that begins the run
        (STRANGER, (), (FIRST,), False),
        (STRANGER, (FIRST,), (FIRST,), False),
        ((FIRST, SECOND), (), (), True),
        ((FIRST, SECOND), STRANGER, (), False),
        ((FIRST, SECOND, STRANGER[0]), (), (), True),
        ((FIRST,), (SECOND,), (FIRST,), False),
        ((FIRST,), (STRANGER[0],), (FIRST, STRANGER[0]), False),
        ((FIRST, SECOND), (STRANGER[0],), (FIRST,), True),
        (("client:one", "client:two"), (), (), False),  # of clients the host is not known
    ],
)
def test_the_minority_of_hosts_is_wrong(
    differing: tuple[str, ...], alike: tuple[str, ...], given: tuple[str, ...], outvoted: bool
) -> None:
    progress = RunProgress("run.progress", OWN, Mock(), Mock(), lambda: 0.0, given)
    assert progress.is_outvoted(differing, alike) is outvoted


def test_peers_of_one_machine_believe_the_peer_that_they_join() -> None:
    first, second, third, own = (f"127.0.0.1:{number}" for number in range(1, 5))
    progress = RunProgress("run.progress", own, Mock(), Mock(), lambda: 0.0, [first])
    assert progress.is_outvoted([first, second], [])
    assert not progress.is_outvoted([second, third], [first])
