"""How long to wait for other peers: deadlines learned from their earlier behaviour, measured in fair seconds."""
