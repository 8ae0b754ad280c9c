"""What can be seen of a peer from outside: its receipts and its status."""
