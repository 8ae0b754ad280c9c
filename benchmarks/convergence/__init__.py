"""Compares how well a language model learns with each strategy, with the same total number of tokens."""
