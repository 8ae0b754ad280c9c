"""Tokens and names, as rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import ProtocolViolationError
from averaging.transport.grpc.authentication import (
    check_claim,
    is_token,
)

TOKENS = ("new-token-0123456789", "old-token-0123456789")


@given(st.text() | st.binary())
def test_whatever_else_is_sent_is_no_token(value: str | bytes) -> None:
    assert not is_token(value, TOKENS)
    assert not is_token(value, ())


@pytest.mark.parametrize("endpoint", ["a.example.org:1", "192.0.2.7:65535", "client::x", "", "no endpoint"])
def test_names_that_may_be_used(endpoint: str) -> None:
    check_claim(endpoint, ["a.example.org", "192.0.2.7"])


@pytest.mark.parametrize(("endpoint", "hosts"), [("b.example.org:1", ["a.example.org"]), ("192.0.2.7:1", [])])
def test_names_that_are_others(endpoint: str, hosts: list[str]) -> None:
    with pytest.raises(ProtocolViolationError, match="its certificate is for (a.example.org|no host)"):
        check_claim(endpoint, hosts)
