"""Compares the all-reduce of this library with Gloo and hivemind, in separate processes on loopback."""
