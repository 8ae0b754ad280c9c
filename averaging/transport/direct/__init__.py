"""The direct lane: parts between two peers of this software travel on a TCP connection beside gRPC.

`DirectTransport` is the gRPC transport with this lane. The lane is negotiated over gRPC
(`averaging.direct.v1.Direct/Open`), and gRPC carries the parts where it cannot be had.
"""

from averaging.transport.direct.transport import DirectTransport as DirectTransport
