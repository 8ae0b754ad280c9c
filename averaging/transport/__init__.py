"""How peers reach each other: a contract, gRPC, and a network in memory."""
