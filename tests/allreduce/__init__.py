"""Tests of allreduce."""
