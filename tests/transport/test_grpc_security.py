"""Tokens and names, as rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.config import Inspection
from averaging.errors import ProtocolViolationError
from averaging.security.credentials import Credentials
from averaging.transport.grpc.authentication import (
    HEALTH_CHECK,
    call_metadata,
    check_claim,
    denial,
    is_token,
    needs_token,
)

TOKENS = ("new-token-0123456789", "old-token-0123456789")


def test_the_first_token_is_sent_and_all_are_accepted() -> None:
    ((name, value),) = call_metadata(TOKENS)
    assert (name, value) == ("authorization", f"Bearer {TOKENS[0]}")
    assert call_metadata(()) == ()
    for token in TOKENS:
        assert is_token(f"Bearer {token}", TOKENS)
        assert is_token(f"bearer {token}".encode(), TOKENS)
        assert not is_token(f"Bearer {token}", ("another-token-012345",))


@given(st.text() | st.binary())
def test_whatever_else_is_sent_is_no_token(value: str | bytes) -> None:
    assert not is_token(value, TOKENS)
    assert not is_token(value, ())


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", TOKENS[0], f"Basic {TOKENS[0]}", f"Bearer {' '.join(TOKENS)}"]
)
def test_a_token_stands_alone(value: str) -> None:
    assert not is_token(value, TOKENS)


def test_a_call_is_denied_with_the_remedy() -> None:
    closed, open_ = Credentials(tokens=TOKENS), Credentials()
    path = "/DecentralizedAveraging/rpc_join_group"
    assert denial(path, [], open_) is None
    assert denial(path, [("user-agent", "x"), *call_metadata(TOKENS)], closed) is None
    assert denial(HEALTH_CHECK, [], closed) is None
    assert "none was sent; give token_file to all peers of the run, or to none" in (denial(path, [], closed) or "")
    told = denial(path, [("authorization", "Bearer another-token-012345")], closed)
    assert told is not None
    assert "the token that was sent is not one of this run" in told
    assert not any(token in told for token in (*TOKENS, "another-token"))


@pytest.mark.parametrize(
    ("path", "inspected"),
    [
        ("/averaging.status.v1.Status/GetStatus", True),
        ("/averaging.status.v1.Status/GetSchema", True),
        ("/averaging.gossip.v1.Gossip/ListRecords", True),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", True),
        ("/grpc.channelz.v1.Channelz/GetServers", True),
        ("/averaging.gossip.v1.Gossip/Push", False),
        ("/averaging.gossip.v1.Gossip/Exchange", False),
        ("/DecentralizedAveraging/rpc_download_state", False),
        ("/grpc.health.v1.Health/Watch", False),
        ("/unknown/Method", False),
        ("", False),
    ],
)
def test_what_is_open_to_those_without_a_token(path: str, inspected: bool) -> None:
    assert needs_token(path, Inspection.ON) is not inspected
    assert needs_token(path, Inspection.TOKEN)
    assert needs_token(path, Inspection.OFF)
    assert not needs_token(HEALTH_CHECK, Inspection.OFF)


@pytest.mark.parametrize("endpoint", ["a.example.org:1", "192.0.2.7:65535", "client::x", "", "no endpoint"])
def test_names_that_may_be_used(endpoint: str) -> None:
    check_claim(endpoint, ["a.example.org", "192.0.2.7"], lambda: None)


@pytest.mark.parametrize(("endpoint", "hosts"), [("b.example.org:1", ["a.example.org"]), ("192.0.2.7:1", [])])
def test_names_that_are_others(endpoint: str, hosts: list[str]) -> None:
    with pytest.raises(ProtocolViolationError, match="its certificate is for (a.example.org|no host)"):
        check_claim(endpoint, hosts, lambda: None)
