"""How peers that want to average at about the same time become a group under a leader.

Read `rules` first: it holds the decisions as pure functions. Then read `matchmaking`, which serves one peer and leads,
and `follower_side`, which asks other peers to lead. `search_state` is one search, `memory` what is remembered of other
peers.
"""

from averaging.matchmaking.matchmaking import Matchmaking as Matchmaking
from averaging.matchmaking.memory import Arrivals as Arrivals, Conduct as Conduct
from averaging.matchmaking.rules import LEAST_SEARCH as LEAST_SEARCH, Quorum as Quorum
from averaging.matchmaking.search_state import NoGroupError as NoGroupError, SearchConfig as SearchConfig
