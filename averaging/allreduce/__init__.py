"""One butterfly all-reduce of a group: every member sends each reducer its parts and gets their averages back.

In the order in which a tensor meets them: `partition` (who reduces what), `sending` (parts out, averages in),
`reducing` (parts in, averages out), `reducer` (the sums), `tally` (what came of it), `round` (all of it in time).
"""

from averaging.allreduce.round import AllReduce
from averaging.allreduce.round_account import RoundResult, changes

__all__ = ["AllReduce", "RoundResult", "changes"]
