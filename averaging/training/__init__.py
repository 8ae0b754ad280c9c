"""The training thread's side: the inner optimizer, what travels beside the tensors, the way to the peer's thread."""
