"""One peer: its parts while it runs, what it averages round by round, and what it answers to others.

In the order in which a tensor meets them: `peer`, `topics` (what is averaged under which name), `rounds` (one attempt).
"""
