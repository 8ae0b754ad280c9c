"""Certificates and tokens: how peers authenticate each other, and how the certificates of a run are made."""
