"""Checks and helpers that several packages use."""
