"""Two sites train a divided model together; one of them loses a node, goes on without it, and takes it back."""
