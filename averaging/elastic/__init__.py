r"""Elastic torchrun jobs: the rendezvous backend `averaging`, which survives the loss of nodes and of its register.

```
torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=averaging --rdzv-endpoint=HOST:PORT \
  --rdzv-id=JOB train.py
```

docs/how-to/sites.md explains its use. Read in this order: `register` (what a register is, in memory and over gRPC),
`session` (the register of one node, which may host it, or in etcd), `rendezvous_state` (the state that torch needs,
in a register), `options`, `backend`, `handler` (what torch calls).
"""

from averaging.elastic.register import REGISTER_METRICS as REGISTER_METRICS, RegisterService as RegisterService
