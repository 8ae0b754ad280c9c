"""Tests of averaging.engine without transformers; tests/trainers/test_serve.py has those with it."""
