"""One butterfly all-reduce of a group: every member sends each reducer its parts and gets their averages back.

Read in this order: `partition` (who reduces what), `sender_side` (parts out, averages in), `reducer_side` (parts in,
averages out), `shard_reducer` (the sums), `round_tally` (the results), `round` (both sides, with their deadlines).
"""

from averaging.allreduce.partition import Part
from averaging.allreduce.round import AllReduce
from averaging.allreduce.round_tally import LyingLeaderError, RoundResult, changes

__all__ = [
    "AllReduce",
    "LyingLeaderError",
    "Part",
    "RoundResult",
    "changes",
]
