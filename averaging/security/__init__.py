"""Who a peer is and who may join a run: certificates and tokens, and how the certificates are made."""
