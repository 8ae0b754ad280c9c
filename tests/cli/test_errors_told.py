"""Errors name the peer they are of once."""

from __future__ import annotations

from averaging.errors import CallRefusedError, NoSeedAnsweredError

FOREIGN = "192.0.2.7:4222 belongs to run 'a', not to 'b'"


def test_a_peer_that_names_itself_in_its_refusal_is_not_named_twice() -> None:
    error = CallRefusedError("192.0.2.7:4222", FOREIGN)
    assert (str(error), error.reason) == (FOREIGN, FOREIGN)
    assert str(CallRefusedError("192.0.2.7:42", FOREIGN)) == f"192.0.2.7:42: {FOREIGN}"
    assert str(CallRefusedError("192.0.2.7:4222", "busy")) == "192.0.2.7:4222: busy"
    assert str(CallRefusedError("192.0.2.7:4222", "192.0.2.7:4222: busy")) == "192.0.2.7:4222: busy"


def test_seeds_that_name_themselves_are_not_named_twice() -> None:
    told = str(NoSeedAnsweredError({"192.0.2.7:4222": FOREIGN, "192.0.2.8:4222": "no answer"}, 10.0))
    assert f"({FOREIGN}; 192.0.2.8:4222: no answer)" in told
