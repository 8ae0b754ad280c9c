"""Receipts and status of a peer, and their explanation."""
