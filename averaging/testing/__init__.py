"""A network, a discovery and a clock in one process, for tests of training scripts: docs/how-to/testing.md.

Read in this order: `transport` (peers call each other in memory), `discovery` (peers find each other in one table),
`virtual_time` (an event loop whose seconds take no time).
"""

from averaging.testing import virtual_time as virtual_time
from averaging.testing.discovery import MemoryDiscovery as MemoryDiscovery, MemoryRegistry as MemoryRegistry
from averaging.testing.transport import MemoryNetwork as MemoryNetwork, MemoryTransport as MemoryTransport
