"""Certificates and tokens: how peers authenticate each other, and how the certificates of a run are made.

Read in this order: `credentials` (what a peer presents and accepts), `client_names` (names that a certificate proves),
`ca` (the authority of a run).
"""

from averaging.security.ca import Issued, issue, make_authority
from averaging.security.client_names import bound_name, fits, is_bound, unbound_name
from averaging.security.credentials import (
    EXPIRES_SOON,
    Credentials,
    PrivateKey,
    Tls,
    hosts_of,
    is_issued_by,
    local_credentials,
    read_credentials,
    read_tls,
    read_tokens,
    validity_problem,
)

__all__ = [
    "EXPIRES_SOON",
    "Credentials",
    "Issued",
    "PrivateKey",
    "Tls",
    "bound_name",
    "fits",
    "hosts_of",
    "is_bound",
    "is_issued_by",
    "issue",
    "local_credentials",
    "make_authority",
    "read_credentials",
    "read_tls",
    "read_tokens",
    "unbound_name",
    "validity_problem",
]
