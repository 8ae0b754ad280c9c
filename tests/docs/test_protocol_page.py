"""The rules of docs/reference/protocol.md that implementations must compute exactly, compared with this one."""

import functools
import math
import operator
import random
import re
from dataclasses import replace
from hashlib import sha256, sha512
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import msgpack

import averaging
from averaging.allreduce.partition import partition, shares
from averaging.discovery.gossip.membership import peer_hash
from averaging.discovery.gossip.record import Ed25519Identity, RecordLimits, entry_hash, record_id
from averaging.discovery.gossip.record_table import RecordTable
from averaging.matchmaking import rules
from averaging.peer import rounds
from averaging.protocol.group import (
    MAX_STATED_GRACE,
    MEAN,
    Aggregation,
    AggregationKind,
    Group,
    Member,
    Mode,
    ReplyForm,
    next_group_bits,
    parse_aggregation,
)
from averaging.protocol.messages import CompressionType, Record, TopK
from averaging.state.manifest import State, pack, read_manifest, resume_at, seal
from averaging.tensors.compression import decode, encode
from averaging.tensors.schema import Schema, TensorSpec
from averaging.tensors.sparse import BlockLayout, Contribution, SparseTensor, VisibleTensor, decode_top_k, encode_union
from averaging.transport.grpc.channel_options import read_resume

PAGE = (Path(averaging.__file__).parents[1] / "docs" / "reference" / "protocol.md").read_text()

EXAMPLE = dict(re.findall(r"^([a-z_ ]+?) +(?:0x)?([0-9a-f]{16,})\b", PAGE, re.MULTILINE))
"""Examples of records and of a group id, by name."""

SCHEMAS = re.findall(r"^(1\|\S+)\n([0-9a-f]{64})$", PAGE, re.MULTILINE)
"""Texts and their hashes."""


def test_the_record_of_the_page() -> None:
    identity = Ed25519Identity(bytes.fromhex(EXAMPLE["private key"]))
    version, claimed = 1_700_000_000_000_001, 1_700_000_000_000_000
    place = ("demo.0b", "192.0.2.7:4222")
    record = Record(*place, b"\xc3", version, 1_700_000_060.5, owner=identity.owner, claimed=claimed)
    number = record_id(*place, identity.owner)
    table = RecordTable(RecordLimits(), lambda _: True)
    assert table.merge(record, now=1_700_000_000.0).is_new
    found = {
        "private key": EXAMPLE["private key"],
        "owner": identity.owner.hex(),
        "signature": identity.sign("demo", record).hex(),
        "id": f"{number:016x}",
        "state_hash": f"{entry_hash(number, version):016x}",
        "place": f"{peer_hash(record.subkey):016x}",
    }
    assert found == {name: EXAMPLE[name] for name in found}
    assert table.state_hash == entry_hash(number, version)


def test_the_in_group_record_and_the_quorum_of_the_page() -> None:
    packed, when = re.findall(r"`([0-9a-f]{38})` for ([0-9.]+)\.", PAGE)[0]
    assert rules.pack_in_group(float(when)).hex() == packed
    assert rules.unpack_in_group(bytes.fromhex(packed)) == float(when)
    assert not rules.unpack_looking(bytes.fromhex(packed))  # to software without a quorum the search is over
    assert f"seconds (0 to {MAX_STATED_GRACE:g})" in PAGE
    assert f"Of more than {rounds.MAX_OVER_RECORDS}\n" in PAGE
    member = Member("a:1", 1.0, None, Mode.NODE, {"quorum": list(rules.Quorum(2, 0.5).stated)})
    assert rules.stated_quorum([member]) == rules.Quorum(2, 0.5)
    assert not rules.counts_for_quorum(replace(member, user={"holds": False}))


@pytest.mark.parametrize(
    ("reply", "aggregation", "topic"),
    [(ReplyForm.AVERAGE, MEAN, ""), (ReplyForm.DELTA, Aggregation(AggregationKind.CLIP, 0.5), "gradients")],
)
def test_the_schema_hashes_of_the_page(reply: ReplyForm, aggregation: Aggregation, topic: str) -> None:
    shapes = {(3,): CompressionType.NONE, (): CompressionType.NONE, (3, 3): CompressionType.BLOCKWISE_INT8}
    tensors = tuple(TensorSpec("", "float32", shape, compression) for shape, compression in shapes.items())
    schema = Schema(tensors, 1 << 20, reply, topic, aggregation)
    assert len(SCHEMAS) == 3
    assert all(sha256(text.encode()).hexdigest() == digest for text, digest in SCHEMAS)
    assert schema.hash.hex() in {digest for _, digest in SCHEMAS}


def test_the_hash_of_the_page_for_a_schema_with_top_k() -> None:
    tensors = (TensorSpec("", "float32", (64, 128), CompressionType.TOP_K), TensorSpec("", "float32", ()))
    schema = Schema(tensors, 1 << 20, topic="changes", sparse=TopK(1 / 64, 2))
    assert schema.hash.hex() == SCHEMAS[-1][1]


def test_the_rules_of_the_page_in_a_schema_s_text() -> None:
    texts = re.findall(r"`(median|(?:trimmed|clip):[0-9][^`]*)`", PAGE)
    assert len(texts) >= 7
    assert [str(parse_aggregation(rule)) for rule in texts] == texts
    spellings = ("10.0", "1e-4", "0.00001", "10000000000000000")
    assert {str(parse_aggregation(f"clip:{tau}")) for tau in spellings} < set(texts)


def draw(words: random.Random, below: int) -> int:
    """A random number below the bound, as the page defines it."""
    digits = below.bit_length()
    while (number := words.getrandbits(32) >> (32 - digits)) >= below:
        pass
    return number


def sample(group_id: bytes, target: int, members: int) -> list[int]:
    """The positions of the members, as the page defines them. Python seeds the twister with the lowest word first."""
    words = random.Random(int.from_bytes(group_id + sha512(group_id).digest(), "big"))
    found: list[int] = []
    if target > 21 + (4 ** math.ceil(math.log(3 * members, 4)) if members > 5 else 0):
        while len(found) < members:
            if (number := draw(words, target)) not in found:
                found.append(number)
        return found
    left = list(range(target))
    for index in range(members):
        place = draw(words, target - index)
        found.append(left[place])
        left[place] = left[target - index - 1]
    return found


def test_the_places_of_the_page() -> None:
    examples = dict(re.findall(r"^(words|\d+ of \d+) +([0-9 ]+)$", PAGE, re.MULTILINE))
    group_id = bytes.fromhex(EXAMPLE["group_id"])
    words = random.Random(group_id)
    assert examples.pop("words") == " ".join(str(words.getrandbits(32)) for _ in range(4))
    assert len(examples) == 3
    for what, places in examples.items():
        members, target = map(int, what.split(" of "))
        assert places == " ".join(map(str, sample(group_id, target, members)))
    rng = random.Random(1)
    for _ in range(300):
        group_id, target = rng.randbytes(20), rng.choice([2, 3, 4, 7, 16, 21, 22, 85, 86, 300])
        members = rng.randint(1, min(target, 40))
        assert sample(group_id, target, members) == random.Random(group_id).sample(range(target), members)


def test_the_next_bits_of_the_page() -> None:
    found = re.search(
        r"^next bits +(\d+), of member i = (\d) of (\d) with d = (\d) and the bits (\d+)$", PAGE, re.MULTILINE
    )
    assert found is not None
    group = Group(bytes.fromhex(EXAMPLE["group_id"]), tuple(Member(f"192.0.2.{n}:1") for n in range(int(found[3]))))
    assert next_group_bits(found[5], group, int(found[2]), int(found[4])) == found[1]


def total(numbers: list[float]) -> float:
    """The order of additions in `numpy.sum`, as the page defines it."""
    if len(numbers) < 8:
        return in_order(numbers)
    if len(numbers) > 128:
        half = len(numbers) // 2 // 8 * 8
        return total(numbers[:half]) + total(numbers[half:])
    whole = len(numbers) - len(numbers) % 8
    runs = [in_order(numbers[first:whole:8]) for first in range(8)]
    halves = [(runs[0] + runs[1]) + (runs[2] + runs[3]), (runs[4] + runs[5]) + (runs[6] + runs[7])]
    return in_order([halves[0] + halves[1], *numbers[whole:]])


def in_order(numbers: list[float]) -> float:
    """Plain sequential addition; Python's `sum` is more accurate from 3.12 on."""
    return functools.reduce(operator.add, numbers)


def owners(bandwidths: list[float], lengths: list[int]) -> list[int]:
    """The reducer of each part if all members announce a bandwidth, as the page defines it."""
    free, fastest, time = len(bandwidths) - 2, 0.0, float("inf")
    for count, bandwidth in enumerate(sorted(bandwidths, reverse=True), start=1):
        if time * bandwidth <= 1:
            break
        fastest += bandwidth
        time = (free + count) / fastest
    by_member = [max(0.0, (time * bandwidth - 1) / free) for bandwidth in bandwidths]
    whole, ends, at = total(by_member), [], 0.0
    for share in by_member:
        at += share
        ends.append(int(at / whole * sum(lengths)))
    ends[-1] = sum(lengths)
    starts, able = [0, *ends[:-1]], [index for index, share in enumerate(by_member) if share]
    result, begin = [], 0
    for length in lengths:
        overlaps = {index: min(begin + length, ends[index]) - max(begin, starts[index]) for index in able}
        most = max(overlaps.values())
        result.append(next(index for index in able if overlaps[index] == most) if most > 0 else able[-1])
        begin += length
    return result


@pytest.mark.parametrize("members", [3, 8, 11, 40, 129, 300])
def test_the_shares_of_the_page(members: int) -> None:
    """With many equal shares and few parts, a difference of one bit assigns a part to another member."""
    rng = random.Random(members)
    for _ in range(200):
        bandwidths = [rng.choice([12.5e6, 12.5e6, 12.5e6, 1e6]) for _ in range(members)]
        size = rng.randint(1, members) * rng.randint(1, 3000)
        check_owners(bandwidths, [size] * rng.randint(1, 4))


def check_owners(bandwidths: list[float], lengths: list[int]) -> None:
    """The page and `partition` assign each tensor, which is one part, to the same member."""
    schema = Schema(tuple(TensorSpec("", "float32", (length,)) for length in lengths), 4 * max(lengths))
    group = [Member(f"192.0.2.1:{index + 1}", bandwidth=bandwidth) for index, bandwidth in enumerate(bandwidths)]
    found = {part.tensor: index for index, one in enumerate(partition(schema, shares(group))) for part in one}
    assert [found[number] for number in range(len(lengths))] == owners(bandwidths, lengths)


@pytest.mark.parametrize(("offset", "count"), [(10, 1), (24, 2), (26, 3)])
def test_the_headers_of_the_page_that_resume_a_download(offset: int, count: int) -> None:
    shapes = {"weight": ("float32", [2, 3]), "none": ("int64", [0]), "bias": ("bfloat16", [4])}
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()}
    entries = [[name, *what, sha256(bytes(tensors[name].nbytes)).digest()] for name, what in shapes.items()]
    header = f"{offset} {sha256(msgpack.encode(entries[:count])).hexdigest()}"
    assert f"\naveraging-resume: {header}\n" in PAGE
    snapshot = seal(State(7, tensors))
    first, *_ = pack(snapshot, read_resume([("averaging-resume", header)]))
    assert read_manifest(first.metadata).skipped == offset
    rest = [
        tensor for message in pack(snapshot, resume_at(snapshot.tensors, offset)) if (tensor := message.tensor_part)
    ]
    assert [len(tensor.buffer) for tensor in rest] == ([14, 0, 8] if offset == 10 else [8] if offset == 24 else [6])
    other = pack(snapshot, read_resume([("averaging-resume", header.upper())]))
    assert read_manifest(next(other).metadata).skipped == 0


def test_the_arithmetic_of_decoders_on_the_page() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 3 + 1
    packed = encode(values, CompressionType.BLOCKWISE_INT8)
    largest = np.frombuffer(packed.buffer, "<f4", 5) / np.float32(127)
    steps = np.frombuffer(packed.buffer, "i1", offset=20).astype(np.float32)
    assert decode(packed).tolist() == (steps * largest.repeat(1024)[:5000]).tolist()
    packed = encode(values, CompressionType.MEANSTD_16BIT)
    mean, std = np.frombuffer(packed.buffer, "<f4", offset=10000)
    assert decode(packed).tolist() == (np.frombuffer(packed.buffer, "<f2", 5000).astype("<f4") * std + mean).tolist()


def test_the_sparse_contributions_of_the_page() -> None:
    first, second = (
        torch.tensor([float(number) for number in text.replace("\u2212", "-").split(", ")])
        for text in re.findall(r"\[([0-9\u2212, ]+)\](?:, d = 1/2|, over the senders)", PAGE)
    )

    def contribution(values: torch.Tensor, top_k: TopK) -> Contribution:
        wire = SparseTensor.of(values, BlockLayout((16,)), top_k).wire(0, 16)
        return Contribution(decode_top_k(wire, 16, top_k), wire.buffer)

    alone, few = contribution(first, TopK(1 / 2, 2)), TopK(1 / 8, 2)
    both = [contribution(first, few), contribution(second, few)]
    assert bytes(alone.buffer).hex() == EXAMPLE["sparse contribution"]
    assert bytes(encode_union(both, 16, few).wire.buffer).hex() == EXAMPLE["reply to two"]
    visible = VisibleTensor.of(first, BlockLayout((16,)), torch.full((16,), 512.0))
    assert bytes(visible.wire(0, 16).buffer).hex() == EXAMPLE["visible contribution"]
