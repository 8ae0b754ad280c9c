"""Errors name the peer they are of once."""

from __future__ import annotations

from averaging.errors import CallRefusedError, JoinError

FOREIGN = "the called peer belongs to run 'a', not to 'b'"


def test_the_caller_names_the_peer_that_refuses() -> None:
    at_the_callee = CallRefusedError("", FOREIGN)
    assert str(at_the_callee) == FOREIGN
    error = CallRefusedError("192.0.2.7:4222", str(at_the_callee))
    assert (str(error), error.reason) == (f"192.0.2.7:4222: {FOREIGN}", FOREIGN)


def test_each_seed_is_named_once() -> None:
    told = str(JoinError({"192.0.2.7:4222": FOREIGN, "192.0.2.8:4222": "no answer"}, 10.0))
    assert f"(192.0.2.7:4222: {FOREIGN}; 192.0.2.8:4222: no answer)" in told
