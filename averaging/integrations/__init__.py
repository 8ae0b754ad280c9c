"""Classes for trainers and loggers. Each module imports its library only when the module itself is imported.

| module | extra |
|---|---|
| `averaging.integrations.transformers` | `averaging[transformers]` |
| `averaging.integrations.accelerate` | `averaging[transformers]` |
| `averaging.integrations.lightning` | `averaging[lightning]` |
| `averaging.integrations.loggers` | `averaging[tensorboard]`, `averaging[wandb]` |

`averaging.integrations.vllm` is loaded by vLLM, which is installed by itself.

What all trainers do with an averager, and what is logged of a round, is in `loggers`.
"""
