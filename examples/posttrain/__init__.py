"""Decentralized post-training on one machine: two elastic sites, a feed, explorers and model workers, with kills."""
