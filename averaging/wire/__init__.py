"""Generated protobuf messages and gRPC stubs: compiled from `protos/` by the build hook, never committed."""
