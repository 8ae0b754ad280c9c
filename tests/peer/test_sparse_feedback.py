"""What a peer has not sent yet with `top_k` and `visible`: sent plus residual is the sum of all changes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from averaging.config import PeerConfig
from averaging.errors import ConfigError, TensorError
from averaging.peer import Adopt, SparseFeedback, Topic
from averaging.peer.topics import make_topic
from averaging.protocol import CompressionType, TopK
from averaging.tensors import SharedTensors, SparseTensor, VisibleTensor

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (70, 130),
    "narrow": (200, 3),
    "bias": (4100,),
    "scale": (),
    "kernel": (3, 5, 7, 2),
    "nothing": (0, 7),
}

Tensors = dict[str, torch.Tensor]


def topic_of(**options: Any) -> Topic:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"buffer": torch.zeros(9)}
    defaults: dict[str, Any] = {"adopt": Adopt.WHOLE, "compression": "top_k", "weights": changes_of(-1)}
    topic = make_topic(PeerConfig(run_id="run"), SharedTensors(tensors), "changes", **(defaults | options))
    return topic.sending_exactly(["buffer"])


def feedback_of(topic: Topic) -> SparseFeedback:
    assert isinstance(topic.feedback, SparseFeedback)
    return topic.feedback


def changes_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    changes = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    changes["narrow"].zero_()  # nobody trains it
    return changes


class Ledger:
    """A peer with its residual, and a list of the change of each round and of what that round has sent of it."""

    def __init__(self, decay: float, top_k: TopK | None) -> None:
        self.options: dict[str, Any] = {"decay": decay, "top_k": top_k}
        if top_k is None:
            self.options = {"compression": "visible"}
        self.feedback = feedback_of(topic_of(**self.options))
        self.rounds: list[tuple[Tensors, Tensors]] = []
        self.pending: Tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def begin(self, change: Tensors) -> Tensors:
        """Begins a round with a further change; returns what the receivers decode."""
        self.pending = {name: self.pending[name] + change[name] for name in SHAPES}
        sent = self.feedback.inputs([*(change.reshape(-1) for change in self.pending.values()), torch.ones(9)])
        assert torch.equal(sent[-1], torch.ones(9))  # type: ignore[arg-type]  # it is dense
        decoded = {}
        for (name, _), layout, tensor in zip(SHAPES.items(), self.feedback.layouts.values(), sent, strict=False):
            assert isinstance(tensor, SparseTensor | VisibleTensor)
            decoded[name] = layout.from_blocks(tensor.dense()).double()
        return decoded

    def end(self, sent: Tensors) -> None:
        self.rounds.append(({name: change.double() for name, change in self.pending.items()}, sent))
        self.pending = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def happens(self, event: str, change: Tensors) -> None:
        """What can happen to a peer; see the names in the test."""
        match event:
            case "alone":
                self.pending = {name: self.pending[name] + change[name] for name in SHAPES}
                self.feedback.applied_alone()
                self.end({name: change.double() for name, change in self.pending.items()})
            case "restart":
                saved, self.feedback = self.feedback.state(), feedback_of(topic_of(**self.options))
                self.feedback.load(saved)
            case "failed":
                self.begin(change)
            case _:
                sent = self.begin(change)
                self.feedback.applied()
                self.end(sent)

    def check(self) -> None:
        """After T rounds, residual = sum over t of decay^(T - t) · (change of round t - what it sent)."""
        state = self.feedback.state()
        for name, shape in SHAPES.items():
            residual = state.get(name, torch.zeros(shape)).double()
            expected, size = torch.zeros(shape, dtype=torch.float64), 1.0
            for age, (change, sent) in enumerate(reversed(self.rounds)):
                expected += self.feedback.decay**age * (change[name] - sent[name])
                size += float(change[name].abs().sum()) if change[name].numel() else 0.0
            torch.testing.assert_close(residual, expected, rtol=0, atol=1e-7 * size)
            if self.feedback.decay == 1:
                every_sent = sum((sent[name] for _, sent in self.rounds), residual)
                every_change = sum((change[name] for change, _ in self.rounds), torch.zeros(shape))
                torch.testing.assert_close(every_sent, every_change, rtol=0, atol=1e-7 * size, check_dtype=False)


EVENTS = ["round", "round", "failed", "alone", "restart", "perhaps applied by others"]


@settings(max_examples=40)
@given(
    events=st.lists(st.sampled_from(EVENTS), max_size=12),
    decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    top_k=st.none() | st.builds(TopK, st.sampled_from([1e-9, 1 / 64, 0.1, 1.0]), st.sampled_from([2, 4, 8])),
    size=st.sampled_from([1.0, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_sent_plus_residual_is_the_sum_of_the_changes(
    events: list[str], decay: float, top_k: TopK | None, size: float, seed: int
) -> None:
    ledger = Ledger(decay, top_k)
    for number, event in enumerate(events):
        ledger.happens(event, {name: change * size for name, change in changes_of(seed + number).items()})
        ledger.check()


def test_what_is_visible_is_sent_and_nothing_else() -> None:
    weights, ledger = changes_of(-1), Ledger(1.0, None)
    assert ledger.feedback.decay == 1.0
    for number in range(4):
        change = {name: tensor * 1e-3 for name, tensor in changes_of(number).items()}
        before = ledger.feedback.state()
        exact = {name: change[name] + before.get(name, 0.0) for name in SHAPES}
        sent = ledger.begin(change)
        ledger.feedback.applied()
        ledger.end(sent)
        for name, tensor in exact.items():
            seen = (weights[name] - tensor).bfloat16() != weights[name].bfloat16()
            assert torch.equal(sent[name].float(), torch.where(seen, tensor.bfloat16().float(), 0.0))
            assert torch.equal(sent[name] + ledger.feedback.state()[name].double(), tensor.double())  # to the bit
        assert 0.1 < float((sent["matrix"] != 0).double().mean()) < 0.5


def test_what_a_round_reads_is_not_changed_by_it() -> None:
    feedback = feedback_of(topic_of())
    changes = [torch.randn(9100), *(torch.randn(600), torch.randn(4100), torch.randn(1), torch.randn(210))]
    changes += [torch.empty(0), torch.ones(9)]
    before = [change.clone() for change in changes]
    for _ in range(2):
        feedback.inputs(changes)
        feedback.applied()
    assert all(map(torch.equal, changes, before))


def test_a_residual_that_was_replaced_during_a_round_stays() -> None:
    ledger = Ledger(1.0, TopK())
    ledger.happens("round", changes_of(1))
    saved = {name: tensor.clone() for name, tensor in ledger.feedback.state().items()}
    ledger.happens("round", changes_of(2))
    ledger.begin(changes_of(3))
    ledger.feedback.load(saved)  # a checkpoint
    ledger.feedback.applied()
    assert all(torch.equal(saved[name], tensor) for name, tensor in ledger.feedback.state().items())
    ledger.begin(changes_of(4))
    ledger.feedback.reset()
    ledger.feedback.applied()
    assert not ledger.feedback.state()


def test_what_was_sent_to_a_round_that_the_run_has_given_up_is_taken_back() -> None:
    ledger = Ledger(0.5, TopK())
    ledger.happens("round", changes_of(1))
    before = {name: 0.5 * tensor + changes_of(2)[name] for name, tensor in ledger.feedback.state().items()}
    ledger.happens("round", changes_of(2))
    ledger.feedback.take_back()
    ledger.feedback.take_back()  # once only
    for name, tensor in ledger.feedback.state().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)


def test_infinity_and_nan_leave_the_residual_as_it_was() -> None:
    ledger = Ledger(1.0, TopK())
    ledger.happens("round", changes_of(1))
    before = {name: tensor.clone() for name, tensor in ledger.feedback.state().items()}
    bad = changes_of(2)
    bad["bias"][5] = torch.nan
    with pytest.raises(TensorError, match="NaN or infinity"):
        ledger.begin(bad)
    ledger.feedback.applied()  # there is nothing to apply
    assert all(torch.equal(before[name], tensor) for name, tensor in ledger.feedback.state().items())


def test_only_changes_can_be_sent_sparsely() -> None:
    for adopt in (Adopt.AVERAGE, Adopt.CHANGE):
        for compression in ("top_k", "visible"):
            with pytest.raises(ConfigError, match=f"compression='{compression}' needs adopt='whole'"):
                topic_of(adopt=adopt, compression=compression)
    with pytest.raises(ConfigError, match="compression='visible' needs the weights that the tensors change"):
        topic_of(compression="visible", weights={})
    topic = topic_of()
    assert [spec.compression for spec in topic.schema.tensors][-2:] == [CompressionType.TOP_K, CompressionType.NONE]
