"""Tests of the data that a peer trains."""
