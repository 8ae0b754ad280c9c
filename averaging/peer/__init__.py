"""One peer: its components while it runs, what it averages round by round, and what it serves to other peers.

Read in this order: `peer`, `topics` (what is averaged under which name), `rounds`.
"""
