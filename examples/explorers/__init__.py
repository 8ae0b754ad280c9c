"""A trainer and four explorers in processes of their own: a policy learns to balance a pole from scored episodes."""
