"""One butterfly all-reduce of a group: every member sends each reducer its parts and gets their averages back.

Read in this order: `partition` (who reduces what), `part_forms` (how parts travel), `stream_limits` (how far ahead, and
how long to wait), `sender_side` (parts out, averages in), `reducer_side` (parts in, averages out), `shard_reducer` (the
averages), `round_tally` (the results), `round` (both sides, with their deadlines).
"""

from averaging.allreduce.part_forms import (
    Averaged as Averaged,
    Part as Part,
    Prepared as Prepared,
    ReplyResidual as ReplyResidual,
    Slice as Slice,
)
from averaging.allreduce.partition import LARGE_PART_BYTES as LARGE_PART_BYTES
from averaging.allreduce.round import AllReduce as AllReduce
from averaging.allreduce.round_tally import RoundResult as RoundResult, changes as changes
