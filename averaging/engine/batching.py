"""What is to be generated, what has been, and which requests are generated together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from averaging.errors import EngineError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Requests with equal values can be generated together.

    Attributes:
        temperature: 0 chooses the most probable token.
        top_p: only the most probable tokens with this much probability together; 1 for all.
        top_k: only so many of the most probable tokens; 0 for all.
        min_p: only tokens with at least this share of the probability of the most probable one; 0 for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What is to be generated.

    Attributes:
        prompts: token ids of each prompt.
        n: sequences for each prompt.
        max_tokens: limit for each sequence.
        sampling: how tokens are chosen.
        seed: makes the result repeatable; such a request is generated alone. None for a random one.
        stop: strings that end a sequence.
        stop_tokens: tokens that end a sequence, beside those of the model.
        include_stop: whether the text has the stop string.
        ignore_eos: whether the token that ends a text does not end it.
        skip_special: whether the text leaves special tokens out.
        top_logprobs: how many tokens' log-probabilities to give beside that of the chosen one; None for none at all.
        version: the version that the weights must have; None for any.
    """

    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special: bool = True
    top_logprobs: int | None = None
    version: int | None = None

    @property
    def sequences(self) -> int:
        """How many sequences are generated at once."""
        return len(self.prompts) * self.n

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token: that of the model, before temperature, top_p and so on.

    Attributes:
        token: token id.
        logprob: its natural logarithm.
        top: the most probable tokens there with theirs, the best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What has been added to a sequence.

    Attributes:
        index: number of the sequence in its request: those of the first prompt come first.
        text: the text that has become final.
        tokens: the tokens.
        logprobs: of each token; empty if they were not asked for.
        finish_reason: "stop" or "length" with the last piece, else None.
        stop_reason: the stop string that ended the sequence, else None.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True, eq=False)
class Generated:
    """A request while it is generated.

    Attributes:
        request: what is to be generated.
        take: callback with each piece, or with the error that ended it, in the thread that generates.
        cancelled: whether nobody wants it any more; then it ends at the next token.
        network: whose it is, see `network_of`.
        version: the version of the weights that generate it, once it has begun; None if they have none.
    """

    request: GenerationRequest
    take: Callable[[TextPiece | EngineError], None]
    cancelled: bool = False
    network: str = ""
    version: int | None = None


def in_turns(networks: Sequence[str], served: Mapping[str, int]) -> list[int]:
    """Returns the indices of waiting requests in the order in which their networks have their turns.

    Args:
        networks: of each request, the oldest first.
        served: number of the last batch with a request of a network; a network that has none comes first.
    """
    earlier: Counter[str] = Counter()
    turns = []
    for network in networks:
        turns.append(earlier[network])
        earlier[network] += 1
    return sorted(range(len(networks)), key=lambda index: (turns[index], served.get(networks[index], -1)))


def next_batch(waiting: Sequence[GenerationRequest], sequences: int, context: int) -> list[int]:
    """Returns which of the waiting requests are generated next, as indices; never none if there are some.

    The first is among them, so that each one's turn comes. Others go with it if they sample alike and all fit.

    Args:
        waiting: the requests, in the order of `in_turns`.
        sequences: limit for the sequences of a batch.
        context: limit for the tokens of a sequence; in a batch all run as long as the longest.
    """
    if not waiting:
        return []
    first = waiting[0]
    chosen, count, longest, most = [0], first.sequences, first.longest, first.max_tokens
    if first.seed is not None:
        return chosen
    for index, request in enumerate(waiting[1:], 1):
        together = max(longest, request.longest) + max(most, request.max_tokens)
        if (
            request.seed is None
            and request.sampling == first.sampling
            and count + request.sequences <= sequences
            and together <= context
        ):
            chosen.append(index)
            count += request.sequences
            longest, most = max(longest, request.longest), max(most, request.max_tokens)
    return chosen
