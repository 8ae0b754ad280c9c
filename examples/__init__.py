"""Runnable examples; `python -m examples.demo` is the first to try."""
