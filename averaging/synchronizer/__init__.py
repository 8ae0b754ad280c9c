"""Hands out the weights of a model by version to processes that do not train.

`Synchronizer` coordinates trainers and explorers (docs/how-to/explorers.md). `WeightPublisher` publishes versions, and
`Follower` keeps a model at the newest one (docs/how-to/follow.md).
"""
