"""Measures matchmaking and discovery with a growing number of peers: seconds, messages and memory."""
