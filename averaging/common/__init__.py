"""Checks and helpers that several rooms use."""
