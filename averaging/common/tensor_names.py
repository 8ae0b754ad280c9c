"""Names of tensors: without the prefixes of wrappers, as a digest that peers compare, and of an adapter. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from averaging.errors import TensorError

T = TypeVar("T")

VERSION_KEY = "averaging.version"  # key of the version of the weights in the metadata of a safetensors file
# peft's names of the two files of an adapter. A published adapter has the bytes of the second as a tensor of this name,
# with a key that only this project knows: the relative error of a cut to a rank, which is 0 if the adapter is exact.
ADAPTER_FILE, ADAPTER_CONFIG, ADAPTER_ERROR = "adapter_model.safetensors", "adapter_config.json", "averaging.error"
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# of torch.compile, FSDP, activation checkpointing, and Lightning Fabric; no module of a user has these names

_PLACEHOLDER = re.compile(r"tensor_\d+|group\d+\.param\d+")


def without_wrappers(names: Iterable[str]) -> list[str]:
    """The names of a model's tensors without the prefixes that wrappers add, such as `_orig_mod.` and `module.`.

    A user's own module may be called `module`, too. So `module` is dropped where nothing stands beside it: then all
    names stay different, and a model has the same names with the wrapper and without it.
    """
    return list(_without_wrappers(tuple(names)))


@lru_cache(maxsize=32)  # the names of a model are asked for again with each version of its weights
def _without_wrappers(names: tuple[str, ...]) -> tuple[str, ...]:
    split = [name.rpartition("/") for name in names]
    paths = [[part for part in path.split(".") if part not in _WRAPPED] for _, _, path in split]
    beside: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            beside.setdefault(tuple(path[:depth]), set()).add(part)
    return tuple(
        prefix
        + slash
        + ".".join(
            part
            for depth, part in enumerate(path)
            if part != "module" or depth == len(path) - 1 or len(beside[tuple(path[:depth])]) > 1
        )
        for (prefix, slash, _), path in zip(split, paths, strict=True)
    )


def plain_state(state: Mapping[str, T]) -> dict[str, T]:
    """A state dict under the names without wrappers' prefixes."""
    return dict(zip(without_wrappers(state), state.values(), strict=True))


def adapter_versions(name: str, models: Iterable[str]) -> list[int]:
    """The versions of an adapter among the names of an engine's models, such as "tune-12" of "tune"."""
    found = (re.fullmatch(rf"{re.escape(name)}-(\d{{1,15}})", model, re.ASCII) for model in models)
    return [int(match[1]) for match in found if match]


def split_adapter(tensors: Mapping[str, T]) -> tuple[dict[str, Any], dict[str, T]]:
    """The configuration and the tensors of an adapter that was published as `LoRAAveraging.adapter_view`.

    Raises:
        TensorError: there is no adapter of LoRA in them.
    """
    if ADAPTER_CONFIG not in tensors:
        raise TensorError(
            "the run publishes no adapter but a model; publish WeightPublisher(strategy.adapter_view(rank=…)), or take "
            "the model"
        )
    try:
        config = json.loads(bytes(cast(Any, tensors[ADAPTER_CONFIG]).numpy()))
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if kind != "LORA":
        raise TensorError(f"the {ADAPTER_CONFIG} that the run publishes is not that of a LoRA adapter of peft")
    return config, {name: tensor for name, tensor in tensors.items() if name != ADAPTER_CONFIG}


def is_placeholder(name: str) -> bool:
    """Whether a name only counts tensors, since the application gave none."""
    return _PLACEHOLDER.fullmatch(name.rpartition("/")[2]) is not None


def digest_of_names(names: Iterable[str]) -> str:
    """What peers compare of the names of their tensors: how many have one, a dash, and a digest; empty for none.

    Two of these say something about each other only if they count equally many names.
    """
    return _digest(tuple(names))


@lru_cache(maxsize=128)  # each phase of a topic asks again
def _digest(names: tuple[str, ...]) -> str:
    named = [(place, name) for place, name in enumerate(without_wrappers(names)) if not is_placeholder(name)]
    if not named:
        return ""
    text = "\0".join(f"{place} {name}" for place, name in named)
    return f"{len(named)}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def contradict(ours: str, theirs: str) -> bool:
    """Whether two digests of names show that the names differ."""
    return ours != theirs and bool(ours) and ours.partition("-")[0] == theirs.partition("-")[0]


def first_other_name(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first two names in the same place that differ, without wrappers' prefixes; None if there are none."""
    for here, there in zip(without_wrappers(ours), without_wrappers(theirs), strict=False):
        if here != there and not is_placeholder(here) and not is_placeholder(there):
            return here, there
    return None


def first_moved_name(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """Like `first_other_name`, where the other side may use names of its own: only names that both have count."""
    plain = set(without_wrappers(ours))
    pair = first_other_name(ours, theirs)
    return pair if pair is not None and pair[1] in plain else None
