"""Certificates and tokens: how peers authenticate each other, and how the certificates of a run are made.

Read in this order: `credentials` (what a peer presents and accepts), `ca` (the authority of a
run).
"""

from averaging.security.ca import Issued as Issued, issue as issue, make_authority as make_authority
from averaging.security.credentials import (
    EXPIRES_SOON as EXPIRES_SOON,
    Credentials as Credentials,
    PrivateKey as PrivateKey,
    Tls as Tls,
    hosts_of as hosts_of,
    is_issued_by as is_issued_by,
    is_open_to_others as is_open_to_others,
    local_credentials as local_credentials,
    read_credentials as read_credentials,
    read_tls as read_tls,
    read_tokens as read_tokens,
    validity_problem as validity_problem,
)
