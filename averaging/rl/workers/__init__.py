"""A master drives model workers by request and reply; docs/how-to/workers.md is the guide.

Read in this order: `plan` (models, calls and hooks), `backend` (what users write for a worker: backends and datasets),
`requests` (what is asked, and how it reaches the workers). At the master: `master_worker` (which requests a step
needs). At a worker: `model_worker` (its requests, calls of backends and hooks), `data_manager` (who holds which
tensors, and their transfers).
"""

from averaging.rl.workers.backend import (
    Backend as Backend,
    Dataset as Dataset,
    ListDataset as ListDataset,
    Sample as Sample,
    SampleBatch as SampleBatch,
)
from averaging.rl.workers.data_manager import DataManager as DataManager, Redistributor as Redistributor
from averaging.rl.workers.master_worker import MasterWorker as MasterWorker, StepResult as StepResult
from averaging.rl.workers.model_worker import WORKER_METRICS as WORKER_METRICS, ModelWorker as ModelWorker
from averaging.rl.workers.plan import (
    Average as Average,
    Call as Call,
    Evaluate as Evaluate,
    HookName as HookName,
    Model as Model,
    ModelShardID as ModelShardID,
    Offload as Offload,
    ParamRealloc as ParamRealloc,
    Plan as Plan,
    Save as Save,
    Topology as Topology,
)
from averaging.rl.workers.requests import (
    Compute as Compute,
    DatasetSpec as DatasetSpec,
    Handle as Handle,
    Payload as Payload,
)
