"""How peers that want to average at about the same time become a group under a leader."""

from averaging.matchmaking.matchmaking import Matchmaking, NoGroupError

__all__ = ["Matchmaking", "NoGroupError"]
