"""Classes for trainers and loggers. Each module imports its library only when the module itself is imported.

| module | extra |
|---|---|
| `averaging.integrations.transformers` | `averaging[transformers]` |
| `averaging.integrations.accelerate` | `averaging[transformers]` |
| `averaging.integrations.lightning` | `averaging[lightning]` |
| `averaging.integrations.loggers` | `averaging[tensorboard]`, `averaging[wandb]` |

What all trainers do with an averager is in `trainer_hooks`, what is logged of a round in `loggers`.
"""
