"""Where a peer looks for others to join: the sources that `join` may name beside addresses.

`seeds` asks each source, and keeps what all have answered.
"""

from averaging.seeds.seeds import (
    FoundSeeds as FoundSeeds,
    Seeds as Seeds,
    expand_hostlist as expand_hostlist,
    look_up as look_up,
)
