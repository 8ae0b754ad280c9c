"""Tokens and names, as rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import ProtocolViolationError
from averaging.security.credentials import Credentials
from averaging.transport.grpc.authentication import (
    HEALTH_CHECK,
    call_metadata,
    check_claim,
    denial,
    is_token,
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
    "path",
    [
        "/averaging.status.v1.Status/GetStatus",
        "/averaging.status.v1.Status/GetSchema",
        "/averaging.gossip.v1.Gossip/ListRecords",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
        "/averaging.gossip.v1.Gossip/Push",
        "/averaging.gossip.v1.Gossip/Exchange",
        "/DecentralizedAveraging/rpc_download_state",
        "/grpc.health.v1.Health/Watch",
        "/unknown/Method",
        "",
    ],
)
def test_what_is_open_to_those_without_a_token(path: str) -> None:
    in_a_run_with_tokens = Credentials(tokens=TOKENS)
    assert denial(path, [], in_a_run_with_tokens) is not None
    assert denial(HEALTH_CHECK, [], in_a_run_with_tokens) is None


@pytest.mark.parametrize("endpoint", ["a.example.org:1", "192.0.2.7:65535", "client::x", "", "no endpoint"])
def test_names_that_may_be_used(endpoint: str) -> None:
    check_claim(endpoint, ["a.example.org", "192.0.2.7"], None)


@pytest.mark.parametrize(("endpoint", "hosts"), [("b.example.org:1", ["a.example.org"]), ("192.0.2.7:1", [])])
def test_names_that_are_others(endpoint: str, hosts: list[str]) -> None:
    with pytest.raises(ProtocolViolationError, match="its certificate is for (a.example.org|no host)"):
        check_claim(endpoint, hosts, None)
