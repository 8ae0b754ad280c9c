"""Schemas, their hash and first difference; options and addresses."""

import hashlib
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.common.addresses import is_endpoint, parse_address
from averaging.common.options import check_weight
from averaging.config import NonFinite, PeerConfig
from averaging.errors import ConfigError, TensorError
from averaging.peer.topics import Adopt, make_topic
from averaging.protocol.group import Aggregation, AggregationKind, Mode, ReplyForm, parse_aggregation
from averaging.protocol.messages import CompressionType, MeanOver, TopK
from averaging.tensors import AVERAGED_DTYPES
from averaging.tensors.schema import Schema, TensorSpec, describe, first_difference
from averaging.tensors.shared_tensors import SharedTensors
from tests.support.tuned import TunedConfig

specs = st.builds(
    TensorSpec,
    name=st.sampled_from(["w", "b"]),
    dtype=st.sampled_from(sorted(AVERAGED_DTYPES)),
    shape=st.lists(st.integers(0, 20), max_size=3).map(tuple),
    compression=st.sampled_from(list(CompressionType)),
)
schemas = st.builds(
    Schema,
    tensors=st.lists(specs, min_size=1, max_size=3).map(tuple),
    part_size_bytes=st.sampled_from([1024, 2048]),
    reply=st.sampled_from(list(ReplyForm)),
    sparse=st.sampled_from([None, TopK(), TopK(1 / 32), TopK(bits=8), TopK(mean_over=MeanOver.ALL)]),
    aggregation=st.sampled_from(
        [Aggregation(), Aggregation(AggregationKind.TRIMMED, 1), Aggregation(AggregationKind.TRIMMED, 2)]
    ),
)


@given(schemas, schemas)
def test_hashes_are_equal_exactly_when_nothing_differs(ours: Schema, theirs: Schema) -> None:
    agree = (
        [(t.dtype, t.shape, t.compression) for t in ours.tensors]
        == [(t.dtype, t.shape, t.compression) for t in theirs.tensors]
        and ours.part_size_bytes == theirs.part_size_bytes
        and ours.reply == theirs.reply
        and ours.aggregation == theirs.aggregation
        and ours.sparse == theirs.sparse
    )
    assert (ours.hash == theirs.hash) is agree
    named_alike = [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    assert (first_difference(ours, theirs) is None) is (agree and named_alike)


def test_the_first_difference_is_named() -> None:
    ours = describe(["a", "b"], [torch.zeros(2, 3), torch.zeros(4)], part_size_bytes=1024)
    theirs = describe(["a", "b"], [torch.zeros(2, 3), torch.zeros(5)], part_size_bytes=1024)
    assert first_difference(ours, theirs) == "tensor 'b' is float32[4] as NONE here and float32[5] as NONE there"
    shorter = replace(ours, tensors=ours.tensors[:1])
    assert "2 tensors here and 1 there; 'b'" in str(first_difference(ours, shorter))
    gradients = first_difference(ours, replace(ours, topic="gradients"))
    assert gradients == "the peer's own tensors are averaged here and gradients there"


@pytest.mark.parametrize("rule", ["median", "trimmed:1", "clip:2"])
def test_a_robust_rule_does_not_go_with_top_k(rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"aggregation='{rule}' does not work .* Use aggregation='mean'") as error:
        describe(
            ["a"],
            [torch.zeros(2, 3)],
            part_size_bytes=1024,
            compression=CompressionType.TOP_K,
            aggregation=parse_aggregation(rule),
            sparse=TopK(),
        )
    assert error.value.option == "aggregation"


def test_deltas_do_not_go_with_top_k_nor_does_top_k_without_its_options() -> None:
    tensors, code = [torch.zeros(2, 3)], CompressionType.TOP_K
    with pytest.raises(ConfigError, match="cannot answer with differences"):
        describe(["a"], tensors, part_size_bytes=1024, compression=code, reply=ReplyForm.DELTA, sparse=TopK())
    with pytest.raises(ConfigError, match="needs a TopK"):
        describe(["a"], tensors, part_size_bytes=1024, compression=code)


def test_the_mean_is_not_part_of_the_hash_and_every_other_rule_is() -> None:
    ours = describe(["a"], [torch.zeros(2, 3)], part_size_bytes=1024)
    expected = hashlib.sha256(b"1|float32:2x3:0|1024|average").digest()
    assert ours.hash == expected
    others = [replace(ours, aggregation=parse_aggregation(rule)) for rule in ("median", "clip:1", "clip:1.5")]
    others.append(replace(ours, topic="/median"))
    assert len({expected, *(other.hash for other in others)}) == 5
    assert "by mean here and by clip:1.5 there" in str(first_difference(ours, others[2]))


@pytest.mark.parametrize(
    "text", ["", "sum", "mean:1", "median:", "trimmed", "trimmed:0", "trimmed:1.5", "trimmed:nan", "clip", "clip:0",
             "clip:inf", "clip:-1", "clip:x", "trimmed:1e300"]
)  # fmt: skip
def test_an_invalid_aggregation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="aggregation"):
        PeerConfig(run_id="r", aggregation=text)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_tensor_that_cannot_be_averaged_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(TensorError, match="'steps'.*float32"):
        describe(["w", "steps"], [torch.zeros(1), torch.zeros(1, dtype=dtype)], part_size_bytes=1024)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_refused() -> None:
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        with pytest.raises(TensorError, match="only dense"):
            make_topic(PeerConfig(run_id="run"), SharedTensors([sparse]))


@pytest.mark.parametrize(
    "options",
    [
        {"run_id": ""},
        {"run_id": "a.b"},
        {"join": "h:1"},
        {"join": ["h:0"]},
        {"listen": "h"},
        {"advertise": "a b:1"},
        {"group_size": 1},
        {"group_size": 3, "min_group_size": 4},
        {"group_bits": "012"},
        {"round_timeout": float("nan")},
        {"stall_timeout": float("inf")},
        {"bandwidth": 0.0},
        {"group_bits": "0" * 65},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PeerConfig(**{"run_id": "run", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"run_id": 5},
        {"join": (seed for seed in ["127.0.0.1:4222"])},
        {"round_timeout": "60"},
        {"group_size": "4"},
        {"group_size": float("nan")},
        {"group_bits": 0},
        {"receipts": 5},
        {"insecure": "no"},
    ],
)
def test_an_option_of_another_type_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(options))} must be "):
        PeerConfig(**{"run_id": "run", **options})


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "1", None, pytest.param(10**400, id="huge")])
def test_a_weight_must_be_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        check_weight(weight)


@pytest.mark.parametrize(
    "address", ["", ":", "h", "h:", ":1", "h:x", "h:-1", "::1:5", "h:1:2", "http://h:1", "h:٣", "u@h:1", "\x00:1",
                "h\n:1", "[\x1b[2J]:1", "h:" + "9" * 5000, "[]:1", "[[::1]]:1", "[[169.254.169.254]]:1",
                "[]127.0.0.1[]:1", "[ab:1", "ab]:1", "[@a]:1", "[a@]:1", "h:65536"]
)  # fmt: skip
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(address)
    assert not is_endpoint(address)


def test_a_client_has_a_name_but_no_address() -> None:
    assert not is_endpoint("client::\x1b[2J")
    assert is_endpoint("client::1234")
    assert not is_endpoint("h:0")


@pytest.mark.parametrize(
    ("option", "kind"), [("mode", Mode), ("compression", CompressionType), ("non_finite", NonFinite)]
)
def test_members_of_enums_may_be_given_by_name(option: str, kind: type[Enum]) -> None:
    for member in kind:
        if isinstance(member, CompressionType) and member.is_sparse:
            continue
        for value in (member, member.name, member.name.lower(), f" {member.name.title()} "):
            assert getattr(PeerConfig(run_id="run", **{option: value}), option) is member  # type: ignore[arg-type]
    for wrong in ("none of these", "", None, 1.5):
        with pytest.raises(ConfigError, match=rf"{option} must be one of \w+, .*, not {wrong!r}"):
            PeerConfig(run_id="run", **{option: wrong})  # type: ignore[arg-type]


def test_adopting_the_whole_never_uses_deltas() -> None:
    config, tensors = TunedConfig(run_id="run", reply_form=ReplyForm.DELTA), SharedTensors([torch.ones(2)])
    replies = {how: make_topic(config, tensors, adopt=how).schema.reply for how in Adopt}
    assert replies == {Adopt.AVERAGE: ReplyForm.DELTA, Adopt.WHOLE: ReplyForm.AVERAGE, Adopt.CHANGE: ReplyForm.DELTA}


def test_deltas_need_no_error_feedback() -> None:
    config, tensors = TunedConfig(run_id="run", reply_form=ReplyForm.DELTA), SharedTensors([torch.ones(2)])
    kept = {how: make_topic(config, tensors, adopt=how, error_feedback=True).feedback is not None for how in Adopt}
    assert kept == {Adopt.AVERAGE: False, Adopt.WHOLE: True, Adopt.CHANGE: False}
