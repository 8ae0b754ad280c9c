"""Tests of averager."""
