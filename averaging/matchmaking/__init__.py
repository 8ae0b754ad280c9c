"""How peers that want to average at about the same time become a group under a leader.

Read `rules` first: it holds the decisions as pure functions. Then read `matchmaking`, which serves one peer and leads,
and `follower_side`, which asks other peers to lead. `search_state` is one search, `arrivals` and `conduct` what is
remembered of other peers.
"""

from averaging.matchmaking.arrivals import Arrivals
from averaging.matchmaking.conduct import Exclusions, ResponseHistory
from averaging.matchmaking.follower_side import LoggedDifferences
from averaging.matchmaking.matchmaking import Matchmaking
from averaging.matchmaking.rules import LEAST_SEARCH, Quorum, holds_state
from averaging.matchmaking.search_state import NoGroupError

__all__ = [
    "LEAST_SEARCH",
    "Arrivals",
    "Exclusions",
    "LoggedDifferences",
    "Matchmaking",
    "NoGroupError",
    "Quorum",
    "ResponseHistory",
    "holds_state",
]
