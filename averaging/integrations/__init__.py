"""Classes for trainers and loggers. Each module imports its library only when the module itself is imported.

| module | extra |
|---|---|
| `averaging.integrations.transformers` | `averaging[transformers]` |
| `averaging.integrations.accelerate` | `averaging[transformers]` |
| `averaging.integrations.lightning` | `averaging[lightning]` |
| `averaging.integrations.tensorboard` | `averaging[tensorboard]` |
| `averaging.integrations.wandb` | `averaging[wandb]` |
"""
