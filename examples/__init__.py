"""Runnable examples. Start with `python -m examples.demo`."""
