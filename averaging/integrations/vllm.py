"""Use of published weights in vLLM: a backend of its weight transfer. docs/how-to/follow.md is the guide.

vLLM finds it as the plugin `averaging`, so that it works where `averaging` is installed beside vLLM:
`vllm serve MODEL --weight-transfer-config '{"backend": "averaging"}'`. `averaging follow --engine` then has every
worker load each version, through the server's routes for weight transfer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from averaging.common import listed
from averaging.config import FilePath, tls_files
from averaging.rpc import EventLoopThread, read_credentials
from averaging.weights import FollowerOptions, ModelReceiver, WeightSnapshot

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
except ImportError as error:
    raise ImportError("averaging.integrations.vllm needs vLLM 0.33 or newer, which is not installed here") from error

BACKEND = "averaging"  # in `--weight-transfer-config`


@dataclass
class AveragingInitInfo(WeightTransferInitInfo):
    """What the workers of an engine follow: the `init_info` of `/init_weight_transfer_engine`."""

    join: Sequence[str]  # addresses HOST:PORT of publishers of the model's weights
    run_id: str = ""  # the run whose weights are followed; empty for any
    tls_ca: FilePath | None = None  # certificate of the authority, as a path on the worker's machine, as the others
    tls_cert: FilePath | None = None  # certificate of the workers
    tls_key: FilePath | None = None  # private key of `tls_cert`
    token_file: FilePath | None = None  # file with the run's tokens
    join_timeout: float = 10.0  # seconds within which a publisher must answer
    stall_timeout: float = 30.0  # seconds without a message after which another source is asked


@dataclass
class AveragingUpdateInfo(WeightTransferUpdateInfo):
    """Which version the workers load: the `update_info` of `/update_weights`."""

    # which all workers then have; None for the newest one that has arrived, which may differ between workers
    version: int | None = None
    timeout: float = 600.0  # seconds to wait until it has arrived


class AveragingWeightTransferEngine(WeightTransferEngine[AveragingInitInfo, AveragingUpdateInfo]):
    """Follows a publisher in the engine's worker, and loads a version when it is asked to.

    The worker receives the pieces that have changed while the engine serves requests, and verifies their digests. An
    update loads them with the model's own `load_weights`, which knows fused tensors and tensor parallelism. Tensors
    that are loaded into the same layer as a changed one, such as the three of a `qkv_proj`, are loaded with it. All of
    a version is loaded between the start and the end of an update. If loading fails, the next update loads everything.

    Attributes:
        version: the version that the model has; None before the first update.
    """

    init_info_cls = AveragingInitInfo
    update_info_cls = AveragingUpdateInfo
    supports_draft_weight_update = False

    _thread: EventLoopThread | None = None
    _receiver: ModelReceiver | None = None
    version: int | None = None
    _loaded: dict[str, tuple[bytes, ...]] | None = None  # digests of what the model has; None if that is unknown
    _layers: dict[str, frozenset[str]] | None = None  # by tensor, the layers that it is loaded into
    _update: tuple[int, dict[str, tuple[bytes, ...]]] | None = None  # loaded, and not finished yet

    def init_transfer_engine(self, init_info: AveragingInitInfo) -> None:
        """Connects to a publisher, in place of the one before.

        Raises:
            ValueError: an argument is invalid.
            AveragingError: no publisher answers, or all refuse this follower.
        """
        self.shutdown()
        options = FollowerOptions(
            join=init_info.join,
            run_id=init_info.run_id,
            credentials=read_credentials(
                tls=tls_files(init_info.tls_ca, init_info.tls_cert, init_info.tls_key), token_file=init_info.token_file
            ),
            listen=None,
            join_timeout=init_info.join_timeout,
            stall_timeout=init_info.stall_timeout,
        )
        self._receiver = ModelReceiver(options)
        self._thread = EventLoopThread(self._receiver, "the follower of weights")

    def start_weight_update(self) -> None:
        """Does nothing: the model is prepared once the version is here, so that a failure before leaves it whole."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: AveragingUpdateInfo) -> None:
        """Waits for the version and loads what has changed.

        Raises:
            RuntimeError: the engine is not initialized, the version did not come in time, or a newer one is here.
            ValueError: the model has other tensors.
        """
        snapshot = self._wait_for(update_info)
        digests = dict(_digests(snapshot))
        names = self._names_to_load(digests)
        if names:
            tensors = snapshot.tensors()
            initialize_layerwise_reload(self.model)
            try:
                self._load([(name, tensors[name]) for name in names])
            except BaseException:
                self._loaded = None
                self._finalize()
                raise
        self._update = snapshot.manifest.version, digests

    def finish_weight_update(self) -> None:
        """Ends the update; the model has the version from now on."""
        if self._update is None:
            return
        version, digests = self._update
        self._update = None
        self._loaded = None  # unless the next line succeeds
        self._finalize()
        self.version, self._loaded = version, digests

    def shutdown(self) -> None:
        thread, self._thread, self._receiver = self._thread, None, None
        if thread is not None:
            thread.close()

    def _wait_for(self, wanted: AveragingUpdateInfo) -> WeightSnapshot:
        if self._thread is None or self._receiver is None:
            raise RuntimeError("the backend follows nobody yet; call /init_weight_transfer_engine with join first")
        before = self.version if wanted.version is None else wanted.version - 1
        self._thread.check()
        arrived = self._thread.run(self._receiver.wait_newer(before, wanted.timeout))
        if self._receiver.failure is not None and not arrived:
            raise self._receiver.failure
        newest = self._receiver.newest
        if newest is None or (wanted.version is not None and not arrived):
            raise RuntimeError(f"{_named(wanted.version)} has not arrived within {wanted.timeout:g} s")
        version = newest.manifest.version
        if wanted.version is not None and version != wanted.version:
            raise RuntimeError(f"{_named(wanted.version)} has been replaced by version {version}; ask for that one")
        return newest.whole()

    def _names_to_load(self, digests: dict[str, tuple[bytes, ...]]) -> list[str]:
        """The tensors that have changed, and those that are loaded into the same layers; all if that is unknown."""
        layers, loaded = self._layers, self._loaded
        if layers is None or loaded is None or loaded.keys() != digests.keys():
            return list(digests)
        touched = {layer for name in digests if digests[name] != loaded[name] for layer in layers[name]}
        return [name for name in digests if layers[name] & touched]

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        layers: dict[str, frozenset[str]] = {}
        loaded: set[str] = set()
        knows_names = True
        for name, tensor in tensors:
            try:
                names = self.model.load_weights([(name, tensor)])
            except (KeyError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"the engine's model does not take tensor {name!r} of the run: {error}; serve the model that the "
                    "run trains, and publish its own state dict"
                ) from error
            knows_names &= names is not None
            loaded.update(names or ())
            layers[name] = frozenset(each.rpartition(".")[0] for each in names or ())
        if self._loaded is None:
            if knows_names:
                self._check_complete(loaded)
            self._layers = layers if knows_names else None

    def _check_complete(self, loaded: set[str]) -> None:
        """Checks that the run publishes the whole model. A quantised one has tensors that no checkpoint holds."""
        if self.vllm_config.quant_config is None:
            left = [name for name, _ in self.model.named_parameters() if name not in loaded]
            if left:
                raise ValueError(f"the run does not publish {listed(left)}; serve the model that the run trains")

    def _finalize(self) -> None:
        with _without_warnings_of_unchanged_layers():
            finalize_layerwise_reload(self.model, self.model_config)


def register() -> None:
    """Makes the backend known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # it refuses a second registration
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, AveragingWeightTransferEngine.__name__)


def _digests(snapshot: WeightSnapshot) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    """What identifies the bytes of each tensor, by name: the digests of its pieces, or its own if it shares one."""
    manifest, layout = snapshot.manifest, snapshot.manifest.layout
    for number, spec in enumerate(layout.tensors):
        bucket = layout.places[number].bucket
        if len(layout.in_bucket(bucket)) > 1:
            yield spec.name, (hashlib.sha256(snapshot.of_tensor(number).data).digest(),)
        else:
            pieces = layout.of_bucket(bucket)
            yield spec.name, manifest.piece_digests[pieces.start : pieces.stop]


def _named(version: int | None) -> str:
    return "a new version" if version is None else f"version {version}"


@contextmanager
def _without_warnings_of_unchanged_layers() -> Iterator[None]:
    """VLLM warns of each layer that an update leaves as it is, which is the purpose here."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def is_wanted(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    log.addFilter(is_wanted)
    try:
        yield
    finally:
        log.removeFilter(is_wanted)
