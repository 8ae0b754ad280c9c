"""How peers find each other: a contract, gossip between the peers, and a table in memory."""
