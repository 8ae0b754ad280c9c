"""Error feedback: all that was sent plus the residual equals all inputs."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.allreduce import Part, Prepared, ReplyResidual, RoundResult, changes
from averaging.config import PeerConfig
from averaging.errors import ConfigError
from averaging.peer.topics import ErrorFeedback, make_topic
from averaging.protocol.group import Member, Mode
from averaging.protocol.messages import COMPRESSIONS, CompressionType
from averaging.tensors.compression import decode, encode
from averaging.tensors.schema import describe
from averaging.tensors.shared_tensors import SharedTensors
from averaging.testing import virtual_time
from tests.support.rounds import Simulation, nodes
from tests.support.selection import rest_is_long

LOSSY = sorted({*COMPRESSIONS.values()} - {CompressionType.NONE})


@given(
    code=st.sampled_from(LOSSY),
    seed=st.integers(0, 10_000),
    rounds=st.lists(st.sampled_from(["encoded", "own", "lost"]), min_size=1, max_size=6),
)
def test_the_sum_of_what_was_sent_plus_the_residual_is_the_sum_of_the_inputs(
    code: CompressionType, seed: int, rounds: list[str]
) -> None:
    """Over rounds in which a part is reduced elsewhere, here, or by a member that dies."""
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(describe(["w"], [torch.empty(40)], compression=code, part_size_bytes=1024))
    put_in, sent = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for end in rounds:
        middle = int(torch.randint(1, 39, (), generator=generator))
        tensor = torch.randn(40, generator=generator)
        inputs = feedback.inputs([tensor])
        first, second = Part.of(0, 0, middle), Part.of(0, middle, 40)
        encoded = [first] + ([second] if end == "encoded" else [])
        plain = [second] if end == "own" else []
        feedback.sent(inputs, encoded, plain)
        for part in encoded:
            values = decode(encode(inputs[0][part.slices[0].start : part.slices[0].stop], code))
            sent[part.slices[0].start : part.slices[0].stop] += values
        for part in plain:
            sent[part.slices[0].start : part.slices[0].stop] += inputs[0][part.slices[0].start : part.slices[0].stop]
        for part in [*encoded, *plain]:
            put_in[part.slices[0].start : part.slices[0].stop] += tensor[part.slices[0].start : part.slices[0].stop]
    torch.testing.assert_close(sent + feedback.residuals[0], put_in, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", LOSSY)
def test_residuals_are_not_lost_where_they_are_added_to_half_precision(
    code: CompressionType, dtype: torch.dtype
) -> None:
    """A residual may be smaller than a rounding error of its tensor; that rounding is fed back, too."""
    generator = torch.Generator().manual_seed(0)
    feedback = ErrorFeedback(describe(["w"], [torch.empty(300, dtype=dtype)], compression=code, part_size_bytes=4096))
    put_in, sent = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for round_ in range(50):
        tensor = torch.randn(300, generator=generator).to(dtype)
        inputs = feedback.inputs([tensor])
        assert inputs[0].dtype is dtype
        first, second = Part.of(0, 0, 200), Part.of(0, 200, 300)
        feedback.sent(inputs, [first, second], []) if round_ % 3 else feedback.sent(inputs, [first], [second])
        sent[:200] += decode(encode(inputs[0][:200], code))
        sent[200:] += decode(encode(inputs[0][200:], code)) if round_ % 3 else inputs[0][200:]
        put_in += tensor
    torch.testing.assert_close(sent + feedback.residuals[0], put_in, rtol=0, atol=1e-4)


def test_the_residuals_are_on_the_cpu_whatever_device_torch_uses_by_default() -> None:
    schema = describe(["w"], [torch.empty(4)], part_size_bytes=1024)
    with torch.device("meta"):
        feedback = ErrorFeedback(schema)
    assert feedback.inputs([torch.ones(4)])[0].tolist() == [1.0] * 4


SIZE, ROUNDS = 1024, 100
FRACTIONS = (0.02, 0.05, 0.1, 0.3, 0.45)
"""Changes in each round, in steps of int8: the largest element of every block is 127."""


class LossyRounds(Simulation):
    """Rounds with error feedback, one after the other, of members that hold equal parameters.

    Args:
        adds: whether the parameters' changes are averaged, and not the parameters.
    """

    def __init__(
        self, members: list[Member], code: CompressionType, dtype: torch.dtype, adds: bool, **more: Any
    ) -> None:
        self.adds, self.dtype = adds, dtype
        self.change, begin = torch.zeros(SIZE), torch.zeros(SIZE)
        for place, fraction in enumerate(FRACTIONS):
            self.change[place + 1 :: 8] = fraction
        (self.change if adds else begin)[::8] = 127.0
        self.options: dict[str, Any] = {"compression": code, "part_size_bytes": 256}
        schema = describe(["0"], [begin.to(dtype)], **self.options)
        self.parameters = {member.endpoint: begin.clone() for member in members}
        self.feedbacks = {member.endpoint: ErrorFeedback(schema) for member in members}
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.begin = begin

    def next_round(self, seed: int, members: list[Member]) -> None:
        super().__init__(seed, members, [(SIZE,)], dtype=self.dtype, latency=(0.0, 0.0), **self.options)
        virtual_time.run(self.run())
        assert self.failures == {}

    def residual_of(self, name: str) -> ReplyResidual | None:
        return self.feedbacks[name].replies

    def contributed(self, name: str) -> Sequence[Prepared]:
        member = self.group.members[self.group.index(name)]
        if not member.sends:
            return [self.parameters[name]]
        values = self.change if self.adds else self.parameters[name] + self.change
        share = member.weight / self.group.total_weight
        inputs = self.inputs[name] = self.feedbacks[name].inputs([values.to(self.dtype)], share)
        return inputs

    def adopt(self, name: str, result: RoundResult) -> None:
        if name not in self.inputs:
            self.feedbacks[name].replies.applied()
            return
        plain = [part for part, _ in result.parts if part not in result.encoded]
        self.feedbacks[name].sent(self.inputs[name], result.encoded, plain)
        for _, start, values in changes(result):
            piece = self.parameters[name][start : start + len(values)]
            piece.add_(values) if self.adds else piece.copy_(values)


def worst(
    members: Callable[[int], list[Member]],
    code: CompressionType = CompressionType.BLOCKWISE_INT8,
    dtype: torch.dtype = torch.float32,
    *,
    adds: bool = False,
) -> float:
    """How many steps too much or too little the changes of `ROUNDS` rounds have come to, at all members alike."""
    rounds, rng = LossyRounds(members(0), code, dtype, adds), random.Random(7)
    for number in range(ROUNDS):
        group = members(number)
        rng.shuffle(group)  # which member reduces what changes
        rounds.next_round(number, group)
    first, *others = (rounds.parameters[member.endpoint] for member in members(0) if member.sends)
    assert all(torch.equal(first, other) for other in others)
    came = first - rounds.begin
    return max((came[place + 1 :: 8] - ROUNDS * each).abs().max().item() for place, each in enumerate(FRACTIONS))


@pytest.mark.parametrize(("code", "adds"), [*((code, False) for code in LOSSY), (CompressionType.BLOCKWISE_INT8, True)])
def test_changes_below_a_step_of_the_code_arrive(code: CompressionType, adds: bool) -> None:
    """What the replies lose is not lost either, whoever reduces the next time."""
    assert worst(lambda _: nodes(3), code, adds=adds) <= 2.0


def test_what_an_average_loses_in_bfloat16_arrives() -> None:
    """Where nothing is compressed, but the tensors themselves are coarse."""
    assert worst(lambda _: nodes(3), CompressionType.NONE, torch.bfloat16, adds=True) <= 2.0


OTHERS: dict[str, Callable[[int], list[Member]]] = {
    "changing weights": lambda n: [Member(f"peer:{at + 1}", weight=1.0 + 9 * ((n + at) % 4)) for at in range(4)],
    "a weight that is 0 at times": lambda n: [*nodes(2), Member("peer:3", weight=float(n % 2))],
    "five members": lambda _: nodes(5),
    "an auxiliary": lambda _: [*nodes(2), Member("peer:3", mode=Mode.AUXILIARY)],
    "a client": lambda _: [*nodes(2), Member("client::0", mode=Mode.CLIENT)],
    "two members": lambda _: nodes(2),
    "eight members": lambda _: nodes(8),
}


@pytest.mark.parametrize("kind", rest_is_long(OTHERS, 5))
def test_they_arrive_whoever_the_members_are(kind: str) -> None:
    assert worst(OTHERS[kind]) <= 2.0


@pytest.mark.parametrize("aggregation", ["median", "trimmed:1", "clip:0.5"])
def test_it_does_not_go_with_an_average_that_limits_what_one_peer_sends(aggregation: str) -> None:
    tensors = SharedTensors([torch.ones(2)])
    config = PeerConfig(run_id="run", aggregation=aggregation, compression=CompressionType.BLOCKWISE_INT8)
    with pytest.raises(ConfigError, match="use aggregation='mean', or leave error_feedback out"):
        make_topic(config, tensors, error_feedback=True)
    assert make_topic(config, tensors).feedback is None
