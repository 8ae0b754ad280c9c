"""How the peers of a run find each other: a replicated table of small records that expire.

Read the files in this order:

1. `base`: the contract. Everything outside this package uses only this, `published_record` and the constructors.
2. `published_record`: keeps one record of a peer up to date.
3. `memory`: the contract within one process, over one shared table. The smallest complete implementation.
4. `watchers`: waiting for changes under a key. Both implementations use it.
5. `gossip/`: the default implementation between peers on a network; its docstring continues this list.
"""
