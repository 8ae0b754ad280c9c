"""How long to wait for others: learned from how long they took before, in seconds that count as theirs."""
