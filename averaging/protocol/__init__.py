"""What peers say to each other, and what the members of a group must agree on."""
