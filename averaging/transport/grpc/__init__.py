"""The gRPC transport, with the health, reflection and channelz services for tools such as grpcurl."""

import os
from importlib import metadata

# gRPC reads these once, when it is first imported. Values set by the user take precedence.
_SETTINGS = {
    # The default logs a line for every connection that another peer closes. Callers get an error where it matters.
    "GRPC_VERBOSITY": "ERROR",
    # The default starts threads in every forked process, which sometimes crash. Workers of data loaders need none.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
if tuple(map(int, metadata.version("grpcio").split(".")[:2])) <= (1, 85):  # later releases may not know these names
    # The newer engine moves each read and write to another thread: 10 to 15 % slower (docs/design/performance.md).
    _SETTINGS["GRPC_EXPERIMENTS"] = "-event_engine_client,-event_engine_listener"
_ours = _SETTINGS.keys() - os.environ.keys()
os.environ.update({name: _SETTINGS[name] for name in _ours})

from averaging.transport.grpc.transport import GrpcTransport  # noqa: E402

for _name in _ours:
    del os.environ[_name]

__all__ = ["GrpcTransport"]
