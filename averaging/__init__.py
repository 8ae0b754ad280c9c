"""PyTorch training averaged between machines that nobody orchestrates."""
