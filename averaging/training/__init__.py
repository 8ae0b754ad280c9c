"""What runs in the training thread: the inner optimizer, the state besides the tensors, the link to the peer."""
