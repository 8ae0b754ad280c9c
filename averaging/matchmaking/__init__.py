"""How peers that want to average at about the same time become a group under a leader.

Read `rules` first: it holds the decisions as pure functions. Then read `matchmaking`, which serves one peer and leads,
and `follower_side`, which asks other peers to lead. The other modules are what these remember or report.
"""

from averaging.matchmaking.matchmaking import Matchmaking, NoGroupError

__all__ = ["Matchmaking", "NoGroupError"]
