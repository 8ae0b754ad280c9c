"""Tests of views of a run."""
