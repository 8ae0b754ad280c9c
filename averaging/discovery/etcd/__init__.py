"""Discovery in an etcd 3 cluster, for runs with more peers than each of them can know.

Peers write the same signed records as with gossip, each under a key of its own and all under the lease of their owner.
A peer reads and watches only the keys that somebody at it reads, so what it holds does not grow with the run.

Read in this order: `records` (the keys, what this peer writes, and what it reads), `etcd_discovery` (puts them
together).

docs/design/decisions/discovery.md has the reasons.
"""

from averaging.discovery.etcd.etcd_discovery import EtcdDiscovery as EtcdDiscovery
from averaging.discovery.etcd.records import EtcdSettings as EtcdSettings
