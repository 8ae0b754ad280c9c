"""The messages between peers, and what the members of a group must agree on."""
