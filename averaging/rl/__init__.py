"""Systems for reinforcement learning, three of them with the interfaces of their sources. Nothing below imports them.

`synchronizer` hands weights to explorers, `feed` carries rollouts to trainers, `rollouts` makes them with environments,
`workers` lets a master drive models.
"""
