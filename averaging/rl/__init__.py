"""Three systems for reinforcement learning, with the interfaces of their sources. Nothing below imports them.

`synchronizer` hands weights to explorers, `feed` carries rollouts to trainers, `workers` lets a master drive models.
"""
