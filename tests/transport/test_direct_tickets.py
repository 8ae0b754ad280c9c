"""Tickets admit once, and only who knows nonce and ticket."""

from __future__ import annotations

import pytest

from averaging.errors import ProtocolViolationError
from averaging.transport.direct.frames import commitment_to, proof_of
from averaging.transport.direct.sealing import VALID_SECONDS, Admission, Tickets

TICKET = bytes(32)


def nonce_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def grant(tickets: Tickets, number: int, now: float, host: str = "a") -> None:
    tickets.grant(Admission(host, TICKET, lambda _: None, None), commitment_to(nonce_of(number)), now)


def redeem(tickets: Tickets, number: int, now: float, ticket: bytes = TICKET) -> bool:
    nonce = nonce_of(number)
    return tickets.redeem(nonce, proof_of(nonce, ticket), now) is not None


def test_a_ticket_admits_once_and_in_time() -> None:
    tickets = Tickets()
    grant(tickets, 1, 0.0)
    grant(tickets, 2, 0.0)
    assert redeem(tickets, 1, VALID_SECONDS - 1)
    assert not redeem(tickets, 1, VALID_SECONDS - 1)
    assert not redeem(tickets, 2, VALID_SECONDS)


def test_a_wrong_proof_spends_the_ticket() -> None:
    """Only the owner of the nonce can make one; so there is nothing to try again."""
    tickets = Tickets()
    grant(tickets, 1, 0.0)
    assert not redeem(tickets, 1, 1.0, ticket=bytes(31) + b"x")
    assert not redeem(tickets, 1, 1.0)


def test_a_commitment_has_one_ticket() -> None:
    tickets = Tickets()
    grant(tickets, 1, 0.0)
    with pytest.raises(ProtocolViolationError):
        grant(tickets, 1, 1.0, host="b")
