"""Certificates and tokens: how peers authenticate each other, and how the certificates of a run are made.

Read in this order: `credentials` (what a peer presents and accepts), `ca` (the authority of a
run).
"""

from averaging.security.ca import Issued, issue, make_authority
from averaging.security.credentials import (
    EXPIRES_SOON,
    Credentials,
    PrivateKey,
    Tls,
    hosts_of,
    is_issued_by,
    is_open_to_others,
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
    "hosts_of",
    "is_issued_by",
    "is_open_to_others",
    "issue",
    "local_credentials",
    "make_authority",
    "read_credentials",
    "read_tls",
    "read_tokens",
    "validity_problem",
]
