"""A master drives model workers by request and reply; docs/how-to/workers.md is the guide."""

from averaging.rl.workers.backend import Backend
from averaging.rl.workers.data_manager import DataManager
from averaging.rl.workers.master_worker import MasterWorker
from averaging.rl.workers.model_worker import ModelWorker
from averaging.rl.workers.payload import Compute, DatasetSpec, Handle, HookName, Payload
from averaging.rl.workers.plan import (
    Average,
    Call,
    Evaluate,
    Interface,
    Model,
    ModelShardID,
    Offload,
    OnLost,
    ParamRealloc,
    Plan,
    Save,
    Topology,
)
from averaging.rl.workers.redistributor import Redistributor
from averaging.rl.workers.samples import Dataset, KeySpec, ListDataset, Sample, SampleBatch
from averaging.rl.workers.step_runner import StepResult

__all__ = [
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
