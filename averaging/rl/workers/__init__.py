"""A master drives model workers by request and reply; docs/how-to/workers.md is the guide.

Read in this order: `plan` (models, calls and hooks), `backend` (what users write for a worker: backends and datasets),
`requests` (what is asked, and how it reaches the workers). At the master: `master_worker` (which requests a step
needs). At a worker: `model_worker` (its requests, calls of backends and hooks), `data_manager` (who holds which
tensors, and their transfers).
"""

from averaging.rl.workers.backend import Backend, Dataset, ListDataset, Sample, SampleBatch
from averaging.rl.workers.data_manager import DataManager, Redistributor
from averaging.rl.workers.master_worker import MasterWorker, StepResult
from averaging.rl.workers.model_worker import WORKER_METRICS, ModelWorker
from averaging.rl.workers.plan import (
    Average,
    Call,
    Evaluate,
    HookName,
    Model,
    ModelShardID,
    Offload,
    ParamRealloc,
    Plan,
    Save,
    Topology,
)
from averaging.rl.workers.requests import Compute, DatasetSpec, Handle, Payload

__all__ = [
    "WORKER_METRICS",
    "Average",
    "Backend",
    "Call",
    "Compute",
    "DataManager",
    "Dataset",
    "DatasetSpec",
    "Evaluate",
    "Handle",
    "HookName",
    "ListDataset",
    "MasterWorker",
    "Model",
    "ModelShardID",
    "ModelWorker",
    "Offload",
    "ParamRealloc",
    "Payload",
    "Plan",
    "Redistributor",
    "Sample",
    "SampleBatch",
    "Save",
    "StepResult",
    "Topology",
]
