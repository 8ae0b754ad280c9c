"""Where a peer looks for others to join: the sources that `join` may name beside addresses.

`sources` asks one source once, `etcd` is the one in which peers also write, `seeds` keeps what all have answered.
"""

from averaging.seeds.seeds import FoundSeeds as FoundSeeds, Seeds as Seeds, look_up as look_up
from averaging.seeds.sources import expand_hostlist as expand_hostlist
