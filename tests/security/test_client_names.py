"""The endpoints of clients: with TLS, each is bound to one key."""

from __future__ import annotations

import datetime
import os
import uuid

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from averaging.common.addresses import CLIENT_PREFIX
from averaging.security.ca import issue, make_authority
from averaging.security.credentials import bound_name, fits, is_bound, unbound_name

NOW = datetime.datetime.now(datetime.UTC)
AUTHORITY = make_authority("run", NOW, 10)
ONE, OTHER = (x509.load_pem_x509_certificate(issue(AUTHORITY, name, (), NOW, 1).certificate) for name in "ab")


@given(st.binary(min_size=16, max_size=16))
def test_a_bound_name_is_a_uuid_that_fits_its_certificate_only(random_bytes: bytes) -> None:
    name = bound_name(ONE, random_bytes)
    found = uuid.UUID(name.removeprefix(CLIENT_PREFIX))
    assert (found.version, found.variant) == (8, uuid.RFC_4122)
    assert is_bound(name)
    assert fits(name, ONE)
    assert not fits(name, OTHER)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 121))
def test_no_bit_of_a_bound_name_can_be_changed(random_bytes: bytes, place: int) -> None:
    value = uuid.UUID(bound_name(ONE, random_bytes).removeprefix(CLIENT_PREFIX)).int
    free = [bit for bit in range(128) if bit not in {62, 63, *range(76, 80)}]
    changed = f"{CLIENT_PREFIX}{uuid.UUID(int=value ^ 1 << free[place])}"
    assert is_bound(changed)
    assert not fits(changed, ONE)


def test_two_clients_with_one_certificate_have_different_names() -> None:
    assert bound_name(ONE, os.urandom(16)) != bound_name(ONE, os.urandom(16))


@pytest.mark.parametrize("name", ["client::x", "client::", "a:1", "", unbound_name(bytes(16))])
def test_unbound_names_fit_every_certificate(name: str) -> None:
    assert not is_bound(name)
    assert fits(name, ONE)


def test_another_spelling_of_a_bound_name_is_not_bound() -> None:
    name = bound_name(ONE, bytes(16))
    assert not is_bound(name.upper().replace("CLIENT", "client"))
    assert not is_bound(name.replace("-", ""))
