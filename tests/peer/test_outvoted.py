"""Who is wrong if the options of the peers of a run differ."""

from __future__ import annotations

import pytest

from averaging.peer.run_progress import is_outvoted

OWN, FIRST, SECOND = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"
STRANGER = ("198.51.100.9:1", "198.51.100.9:2", "198.51.100.9:3")  # several records of one host


@pytest.mark.parametrize(
    ("differing", "alike", "given", "outvoted"),
    [
        ((FIRST,), (), (FIRST,), True),  # a newcomer beside the only peer that it knows
        ((FIRST,), (), (), False),  # a stranger beside the peer that begins the run
        (STRANGER, (), (), False),
        (STRANGER, (), (FIRST,), False),
        (STRANGER, (FIRST,), (FIRST,), False),
        ((FIRST, SECOND), (), (), True),
        ((FIRST, SECOND), STRANGER, (), False),
        ((FIRST, SECOND, STRANGER[0]), (), (), True),
        ((FIRST,), (SECOND,), (FIRST,), False),
        ((FIRST,), (STRANGER[0],), (FIRST, STRANGER[0]), False),
        ((FIRST, SECOND), (STRANGER[0],), (FIRST,), True),
        (("client:one", "client:two"), (), (), False),  # clients without a certificate have no vote
    ],
)
def test_the_minority_of_hosts_is_wrong(
    differing: tuple[str, ...], alike: tuple[str, ...], given: tuple[str, ...], outvoted: bool
) -> None:
    assert is_outvoted(OWN, differing, alike, {OWN: "192.0.2.1"}, given) is outvoted


def test_endpoints_of_one_certificate_have_one_vote() -> None:
    assert is_outvoted(OWN, (FIRST, SECOND), (), {OWN: "a", FIRST: "b", SECOND: "c"}, ())
    assert not is_outvoted(OWN, (FIRST, SECOND), (), {OWN: "a", FIRST: "b", SECOND: "b"}, ())


def test_peers_of_one_machine_believe_the_peer_that_they_join() -> None:
    names = [f"127.0.0.1:{number}" for number in range(1, 5)]
    members = dict.fromkeys(names, "localhost")
    assert is_outvoted(names[3], names[:2], (), members, names[:1])
    assert not is_outvoted(names[3], names[1:3], names[:1], members, names[:1])


def test_a_client_without_a_certificate_counts_for_itself() -> None:
    assert not is_outvoted("client:own", (FIRST,), (), {"client:own": ""}, ())
