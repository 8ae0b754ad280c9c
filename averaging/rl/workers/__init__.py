"""A master drives model workers by request and reply; docs/how-to/workers.md is the guide.

Read in this order: `plan` (models, calls and hooks), `backend` (what users write for a worker: backends and datasets),
`payload` (requests and replies, and how they travel). At the master: `master_worker`, `request_client`, `worker_link`
(the stream to a worker), `step_runner` (which requests a step needs). At a worker: `model_worker`, `master_session`
(what it knows of its master), `executor` (calls of backends and hooks), `data_manager` (who holds which tensors, and
their transfers), `parameters` (parameters on their way between models).
"""

from averaging.rl.workers.backend import Backend, Dataset, ListDataset, Sample, SampleBatch
from averaging.rl.workers.data_manager import DataManager, Redistributor
from averaging.rl.workers.master_worker import MasterWorker
from averaging.rl.workers.model_worker import WORKER_METRICS, ModelWorker
from averaging.rl.workers.payload import Compute, DatasetSpec, Handle, Payload
from averaging.rl.workers.plan import (
    Average,
    Call,
    Evaluate,
    HookName,
    Interface,
    KeySpec,
    Model,
    ModelShardID,
    Offload,
    OnLost,
    ParamRealloc,
    Plan,
    Save,
    Topology,
)
from averaging.rl.workers.step_runner import StepResult

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
    "Interface",
    "KeySpec",
    "ListDataset",
    "MasterWorker",
    "Model",
    "ModelShardID",
    "ModelWorker",
    "Offload",
    "OnLost",
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
