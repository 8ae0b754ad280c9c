"""Elastic torchrun jobs: the rendezvous backend `averaging`, which survives the loss of nodes and of its register.

```
torchrun --nnodes=1:3 --nproc-per-node=2 --rdzv-backend=averaging --rdzv-endpoint=HOST:PORT --rdzv-id=JOB train.py
```

docs/sites.md tells how to use it. `register.py` is the contract of a register, `grpc_register.py` serves and calls one.
"""
