"""Decentralized post-training on text: a small model of transformers, an engine, and an environment of verifiers."""
