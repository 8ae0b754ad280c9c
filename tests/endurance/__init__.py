"""Hours of everything at once under faults: `make endurance HOURS=2`.

Read in this order: `plan` (which faults come when; pure), `judge` and `ledgers` (what must hold; pure), `hosts` (the
network, the disk and etcd), `actors` (the processes and what can be done to them), `roster` (which processes there
are), and `__main__`. The processes are `trainer`, `follower`, `rollouts` and `hooked`.
"""
