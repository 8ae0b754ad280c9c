r"""Elastic torchrun jobs: the rendezvous backend `averaging`, which survives the loss of nodes and of its register.

```
torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=averaging --rdzv-endpoint=HOST:PORT \
  --rdzv-id=JOB train.py
```

docs/how-to/sites.md explains its use. `register.py` defines a register, `grpc_register.py` serves and calls one.
`handler.py` is what torch calls, `cell.py` keeps a state in a register, `rendezvous_state.py` encodes it.
"""

from averaging.elastic.grpc_register import RegisterService

__all__ = [
    "RegisterService",
]
