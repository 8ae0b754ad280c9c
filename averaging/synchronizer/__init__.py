"""Hands out the weights of a model by version to processes that do not train.

`Synchronizer` coordinates trainers and explorers. docs/how-to/explorers.md explains its use.
"""
