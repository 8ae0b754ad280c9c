"""The JSON messages between trainers, environments and the server, and the checks of their fields. Pure.

The names, types and defaults are those of atroposlib 0.4.0. Other fields are ignored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Self, TypeVar

import msgspec

from averaging.errors import ConfigError, FeedError

MAX_BATCH_SIZE, MAX_STEP, MAX_WEIGHT = 1 << 16, 1 << 53, 1e9

MAX_VERSIONS = 64  # of the weights that may have made one group
UNKNOWN = -1  # stands for the oldest version of a group if that is unknown, which its environment posts as null
MAX_TOKEN = (1 << 31) - 1  # the largest token id
ENTRY_COST, CONTAINER_COST = 8, 16  # memory of an entry of a JSON object, and of an array or object, in numbers

Message = TypeVar("Message")

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_SIZE)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
Mask = Annotated[int, msgspec.Meta(ge=-100, le=MAX_TOKEN)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
VersionNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Versions = Annotated[list[VersionNumber], msgspec.Meta(min_length=1, max_length=MAX_VERSIONS)]


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The registration of a trainer, which begins a run. The server refuses values that are out of range."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Size  # sequences in a batch, over all ranks
    max_token_len: Int64  # environments drop sequences of this length or longer; 0 or less: no limit
    checkpoint_dir: Text
    save_checkpoint_interval: Int64  # steps between two checkpoints; 0 or less: none is saved
    starting_step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]  # 0, or that of the checkpoint of a resumed training
    num_steps: Int64  # the last step of the training; less than 0: no limit


class RegisterEnv(msgspec.Struct, frozen=True, kw_only=True):
    """The registration of an environment. The server refuses values that are out of range."""

    max_token_length: Int64
    desired_name: Annotated[str, msgspec.Meta(max_length=1024)]
    weight: Annotated[float, msgspec.Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]  # relative to others, see `EnvStatus`
    group_size: Size  # sequences in each of its groups. Smaller groups wait until they add up to it
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None  # its reserved fraction of a batch


class EnvIdentifier(msgspec.Struct, frozen=True):
    """The body of a request about one environment."""

    env_id: int


class ScoredData(msgspec.Struct, kw_only=True):
    """A group: sequences that were scored together and belong into one batch.

    Raises:
        ConfigError: lengths do not match, a score is not finite, or a message has no role or content.
    """

    tokens: list[list[TokenId]]  # of each sequence
    masks: list[list[Mask]]  # the id of each token, or -100 if it is not trained, for example in the prompt
    scores: Sequence[float | bool]  # of each sequence
    advantages: list[list[Finite]] | None = None
    ref_logprobs: list[list[Finite]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[Finite]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Int64 | None = None
    distill_token_ids: list[list[list[TokenId]]] | None = None
    distill_logprobs: list[list[list[Finite]]] | None = None
    # Of the weights that made the group, or all if they changed meanwhile; None if a part is unknown. It is left out of
    # the JSON if it is not set, as atroposlib does not know it.
    version: VersionNumber | Versions | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if not size:
            raise ConfigError("tokens is empty; a group has at least one sequence")
        if len(self.masks) != size or len(self.scores) != size:
            raise ConfigError(
                f"there are {size} sequences in tokens, {len(self.masks)} in masks and {len(self.scores)} scores; "
                "give one mask and one score for each sequence"
            )
        for index, (tokens, masks) in enumerate(zip(self.tokens, self.masks, strict=True)):
            if len(tokens) != len(masks):
                raise ConfigError(
                    f"sequence {index} has {len(tokens)} tokens and {len(masks)} masks; give one mask per token"
                )
        self.scores = [float(score) for score in self.scores]
        if not all(map(math.isfinite, self.scores)):
            raise ConfigError("a score is not finite; give finite numbers")
        for message in (message for sequence in self.messages or () for message in sequence):
            if "role" not in message or "content" not in message:
                raise ConfigError("a message lacks its role or its content")


def oldest_version(version: int | list[int] | msgspec.UnsetType | None) -> int | None:
    """Returns the version that counts for the age of a group: UNKNOWN if it is null, and None if none was posted."""
    if isinstance(version, list):
        return min(version, default=None)
    return UNKNOWN if version is None else version if isinstance(version, int) else None


class Registered(msgspec.Struct, frozen=True):
    """The answer to `RegisterEnv`. The fields after `status` are valid only if it is "success"."""

    status: str
    env_id: int = -1
    wandb_name: str = ""
    checkpoint_dir: str = ""
    starting_step: int = 0
    checkpoint_interval: int = 0
    num_steps: int = 0
    warning: str = ""  # why no batch can be formed


class EnvStatus(msgspec.Struct, frozen=True):
    """The answer to a request for the status. Sizes are in groups of this environment's `group_size`."""

    current_step: int
    queue_size: int
    env_weight: float
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    newest_version: int | None = None  # of the trainer's weights; None if it has reported none
    stale_groups: int = 0  # of this environment that were too old, since the server has started


class Posted(msgspec.Struct, frozen=True):
    """The answer to a post. If some groups are stale, update the weights before the next rollout."""

    status: str  # "received", or "buffered" if the groups wait for others of their environment
    newest_version: int | None = None  # of the trainer's weights; None if it is unknown
    max_staleness: int | None = None  # how many versions a group may be behind it; None for any
    stale: int = 0  # groups of this post that are too old for the trainer, and are not trained


class BatchReply(msgspec.Struct, frozen=True):
    """The answer to a request for a batch; only `batch` from atroposlib's server."""

    batch: list[dict[str, Any]] | None
    status: str = ""
    message: str = ""
    step: int | None = None
    warning: str = ""
    newest_version: int | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """The groups of one request."""

    groups: Sequence[tuple[int | None, int]]  # environment and number of sequences of each
    contents: Sequence[bytes]  # the JSON of each
    key: str  # identifies repetitions of the request; empty if the client sent none
    digest: bytes  # equal in all repetitions of the request
    versions: Sequence[int | None] = ()  # see `oldest_version`, of each group; empty if none has one

    @classmethod
    def of(cls, groups: Sequence[ScoredData], key: str) -> Self:
        """Encodes the groups of a request."""
        digest = blake2b(digest_size=16)
        contents = []
        for group in groups:
            contents.append(msgspec.json.encode(group))
            if key:  # an environment that was restarted may have a new env_id, and newer weights
                unset = msgspec.structs.replace(group, env_id=None, version=msgspec.UNSET)
                digest.update(msgspec.json.encode(unset))
        versions = [oldest_version(group.version) for group in groups]
        known = versions if any(version is not None for version in versions) else ()
        return cls([(group.env_id, len(group.tokens)) for group in groups], contents, key, digest.digest(), known)


def object_count(body: bytes | bytearray) -> int:
    """Returns an upper bound of the memory that decoded JSON takes, relative to that of a number."""
    containers = body.count(b"[") + body.count(b"{")
    return body.count(b",") + ENTRY_COST * body.count(b":") + CONTAINER_COST * containers


def decode(body: bytes | bytearray, kind: type[Message], max_objects: float = math.inf) -> Message:
    """Decodes an untrusted message. Raises a `FeedError` if it is malformed, or may take too much memory."""
    if max_objects < math.inf and object_count(body) > max_objects:
        raise FeedError(f"the body has more than {max_objects} objects; send fewer groups at once", 413)
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        is_too_deep = isinstance(error, RecursionError)  # its text depends on the version of Python
        reason = "it is nested too deeply" if is_too_deep else str(error) or type(error).__name__
        is_malformed = isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError)
        if is_malformed and any(name in body for name in (b"NaN", b"Infinity")):
            reason += "; JSON has neither NaN nor Infinity, so drop the group or give finite numbers"
        raise FeedError(f"the body cannot be used: {reason}", 422) from None
