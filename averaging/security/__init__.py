"""Certificates and tokens: how peers authenticate each other, and how the certificates of a run are made.

`credentials` has both: what a peer presents and accepts, and the authority of a run.
"""

from averaging.security.credentials import (
    EXPIRES_SOON as EXPIRES_SOON,
    Credentials as Credentials,
    Issued as Issued,
    PrivateKey as PrivateKey,
    Tls as Tls,
    hosts_of as hosts_of,
    is_issued_by as is_issued_by,
    is_open_to_others as is_open_to_others,
    issue as issue,
    local_credentials as local_credentials,
    make_authority as make_authority,
    read_credentials as read_credentials,
    read_tls as read_tls,
    read_tokens as read_tokens,
    validity_problem as validity_problem,
)
