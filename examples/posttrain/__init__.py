"""Decentralized post-training on text: an elastic site, a feed, an engine and an environment of verifiers, killed."""
