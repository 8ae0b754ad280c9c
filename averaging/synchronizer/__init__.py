"""Hands out the weights of a model by version to processes that do not train.

`WeightPublisher` publishes versions, and `Follower` keeps a model at the newest one. docs/how-to/follow.md explains
their use.
"""
