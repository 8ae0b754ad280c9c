"""A master drives model workers by request and reply; docs/how-to/workers.md is the guide."""

from averaging.workers.backend import Backend
from averaging.workers.data_manager import DataManager
from averaging.workers.dataset import Dataset, ListDataset
from averaging.workers.graph import Call, Interface, OnLost
from averaging.workers.hooks import Average, Evaluate, Offload, ParamRealloc, Save
from averaging.workers.master_worker import MasterWorker
from averaging.workers.model_worker import ModelWorker
from averaging.workers.payload import Compute, DatasetSpec, Handle, HookName, Payload
from averaging.workers.plan import Model, ModelShardID, Plan, Topology
from averaging.workers.redistributor import Redistributor
from averaging.workers.samples import KeySpec, Sample, SampleBatch
from averaging.workers.step_runner import StepResult

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
