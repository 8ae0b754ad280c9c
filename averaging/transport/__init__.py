"""Calls between peers: the contract, its gRPC implementation, and an in-memory network for tests."""
