"""Measures speed and error of each compression, and up to which link speed it pays.

Speeds are GB of float32 per second, the best of several passes over parts of the default size, as in a round. Errors
are those of one encoding, in units of the data's standard deviation: the maximum, and the root mean square. The
heavy-tailed values have Student's t distribution with 3 degrees of freedom.

A compression pays on links slower than B. "One after the other" means that a part is encoded, sent and decoded before
the next one begins: B < (1 - c/4) / (1/encode + 1/decode) with c bytes per element. "Overlapped" means that the
processor works on one part while another is sent, as in this library's rounds if cores are free:
B < min(encode, decode).

TOP_K has a table of its own: GB of float32 per second of processor time of one thread, on a matrix of normally
distributed numbers. "Encode" is everything that a sender does: tile order, choice, quantisation, bytes; "decode" what a
reducer does with a contribution. A reply of M members is reduced and encoded by one of them, and decoded by all. "A
round" adds up what one member of M does for a billion parameters: it encodes its contribution, decodes its shard of all
contributions, reduces its shard, decodes all replies, and writes them back.

    python -m benchmarks.codecs            # two minutes; the results go to codecs.json
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from averaging.config import PeerConfig
from averaging.protocol.messages import COMPRESSIONS, CompressionType, TopK
from averaging.tensors.compression import codec_of, decode, encode
from averaging.tensors.sparse import (
    BLOCK_ELEMENTS,
    BlockLayout,
    Contribution,
    EncodedUnion,
    SparsePart,
    SparseTensor,
    decode_top_k,
    decode_union,
    encode_union,
)
from benchmarks.runner import machine, make_folder, make_parser, show, write
from benchmarks.workers import say

FLOAT_BYTES = 4

SPARSE = (TopK(1 / 128, 2), TopK(1 / 64, 2), TopK(1 / 64, 8), TopK(1 / 32, 2), TopK(1 / 16, 4))
"""What is measured of TOP_K; the second is the default of DiLoCo."""

GROUPS = (2, 8, 32)
"""Members whose contributions are in a reply."""

GB_OF_A_BILLION = 4.0
"""A billion parameters in float32."""


def samples(count: int) -> dict[str, torch.Tensor]:
    """Values to encode, by the name of their distribution."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, count, generator=generator)
    return {"gaussian": normal[0], "heavy-tailed": normal[0] / (normal[1:].square().sum(dim=0) / 3).sqrt()}


def errors(values: torch.Tensor, decoded: torch.Tensor) -> tuple[float, float]:
    """Returns the maximum and the root mean square error, in standard deviations of `values`."""
    off = decoded.double() - values.double()
    std = values.double().std()
    return float(off.abs().max() / std), float(off.square().mean().sqrt() / std)


def link_speeds(encode_speed: float, decode_speed: float, per_element: float) -> tuple[float, float]:
    """Returns the link speeds up to which a compression pays, one after the other and overlapped."""
    saved = 1 - per_element / FLOAT_BYTES
    if saved <= 0:
        return 0.0, 0.0
    return saved / (1 / encode_speed + 1 / decode_speed), min(encode_speed, decode_speed)


def best_seconds(work: Callable[[], object], passes: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the minimum time of several passes. The first one, which allocates memory, does not count.

    With `time.thread_time` it is the processor time of this thread, so that other programs hardly count.
    """
    found = []
    for _ in range(passes + 1):
        begun = clock()
        work()
        found.append(clock() - begun)
    return min(found[1:])


def replies(top_k: TopK, members: int, blocks: int) -> tuple[list[Contribution], EncodedUnion]:
    """Independent contributions of one part, and their reply."""
    generator = torch.Generator().manual_seed(members)
    layout = BlockLayout((blocks * BLOCK_ELEMENTS,))
    found = []
    for _ in range(members):
        wire = SparseTensor.of(torch.randn(layout.numel, generator=generator), layout, top_k).wire(0, layout.numel)
        found.append(Contribution(decode_top_k(wire, BLOCK_ELEMENTS, top_k), wire.buffer))
    return found, encode_union(found, BLOCK_ELEMENTS, top_k)


def sparse_speeds(top_k: TopK, mib: int, passes: int, groups: Sequence[int] = GROUPS) -> dict[str, Any]:
    """Returns GB of float32 per second of all that is done with TOP_K, and bits a weight."""
    rows = mib << 7  # of 2,048 columns
    values = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0))
    layout, amount = BlockLayout(tuple(values.shape)), values.numel() * FLOAT_BYTES / 1e9
    cuts = list(layout.cuts(PeerConfig.part_size_bytes))

    def rate(work: Callable[[], object], of: float = amount) -> float:
        return of / best_seconds(work, passes, time.thread_time)

    def encoded() -> list[Any]:
        sent = SparseTensor.of(layout.to_blocks(values), layout, top_k)
        return [sent.wire(*cut) for cut in cuts]

    def decoded() -> list[SparsePart]:
        return [decode_top_k(wire, BLOCK_ELEMENTS, top_k) for wire in wires]

    wires, flat = encoded(), layout.to_blocks(values)
    found: dict[str, Any] = {
        "density": top_k.density,
        "bits": top_k.bits,
        "bits_a_weight": 8 * sum(len(wire.buffer) for wire in wires) / values.numel(),
        "encode_gb_per_s": rate(encoded),
        "decode_gb_per_s": rate(decoded),
        "write_back_gb_per_s": rate(lambda: layout.from_blocks(flat)),
        "replies": {},
    }
    blocks = PeerConfig.part_size_bytes // BLOCK_ELEMENTS
    part = blocks * BLOCK_ELEMENTS * FLOAT_BYTES / 1e9
    for members in groups:
        sent, reply = replies(top_k, members, blocks)
        speed = {
            "bits_a_weight": 8 * len(reply.wire.buffer) / reply.part.numel,
            "reduce_gb_per_s": rate(lambda: encode_union(sent, BLOCK_ELEMENTS, top_k), part),  # noqa: B023
            "decode_gb_per_s": rate(lambda: decode_union(reply.wire, BLOCK_ELEMENTS, top_k, members), part),  # noqa: B023
        }
        found["replies"][str(members)] = speed | {"seconds_of_a_billion": seconds_of_a_billion(found, speed, members)}
    return found


def seconds_of_a_billion(top_k: dict[str, float], reply: dict[str, float], members: int) -> float:
    """Processor seconds of one member in a round of a billion parameters."""
    whole = [top_k["encode_gb_per_s"], top_k["decode_gb_per_s"], reply["decode_gb_per_s"], top_k["write_back_gb_per_s"]]
    return GB_OF_A_BILLION * (sum(1 / speed for speed in whole) + 1 / (members * reply["reduce_gb_per_s"]))


def speeds(values: torch.Tensor, code: CompressionType, passes: int) -> tuple[float, float]:
    """Returns GB of float32 per second for encoding and decoding."""
    size = PeerConfig.part_size_bytes // codec_of(code, values.dtype).bytes_per_element
    parts = list(torch.split(values, size))
    packed = [encode(part, code) for part in parts]
    amount = values.numel() * FLOAT_BYTES / 1e9
    encoding = best_seconds(lambda: [encode(part, code) for part in parts], passes)
    decoding = best_seconds(lambda: [decode(wire) for wire in packed], passes)
    return amount / encoding, amount / decoding


def measure(code: CompressionType, threads: Sequence[int], mib: int, passes: int) -> dict[str, Any]:
    """Returns all figures of one compression."""
    data = samples(mib << 18)
    per_element = codec_of(code, torch.float32).bytes_per_element
    found: dict[str, Any] = {"code": code.name, "bytes_per_element": per_element, "threads": {}, "errors": {}}
    for count in threads:
        torch.set_num_threads(count)
        encoding, decoding = speeds(data["gaussian"], code, passes)
        serial, overlapped = link_speeds(encoding, decoding, per_element)
        found["threads"][str(count)] = {
            "encode_gb_per_s": encoding,
            "decode_gb_per_s": decoding,
            "pays_below_gbit_per_s": {"one after the other": 8 * serial, "overlapped": 8 * overlapped},
        }
    for name, values in data.items():
        part = values[: PeerConfig.part_size_bytes // per_element]
        largest, rms = errors(part, decode(encode(part, code)))
        found["errors"][name] = {"max": largest, "rms": rms}
    return found


CODES_HEADER = (
    *("code", "bytes", "threads", "encode", "decode", "pays below Gbit/s", "overlapped"),
    *("gaussian: max", "RMS", "heavy-tailed: max", "RMS"),
)

SPARSE_HEADER = (
    *("density", "bits", "bits up", "encode", "decode"),
    *("members", "bits down", "reduce", "decode reply", "s for 1e9"),
)


def code_rows(codes: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for one in codes:
        lost = [f"{value:.1e}" for kind in one["errors"].values() for value in (kind["max"], kind["rms"])]
        for threads, figures in one["threads"].items():
            pays = [f"{value:.1f}" if value else "" for value in figures["pays_below_gbit_per_s"].values()]
            speeds = [f"{figures[name]:.2f}" for name in ("encode_gb_per_s", "decode_gb_per_s")]
            yield (one["code"], str(one["bytes_per_element"]), threads, *speeds, *pays, *lost)


def sparse_rows(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for row in rows:
        cells = [f"1/{round(1 / row['density'])}", str(row["bits"]), f"{row['bits_a_weight']:.3f}"]
        cells += [f"{row[name]:.2f}" for name in ("encode_gb_per_s", "decode_gb_per_s")]
        for members, reply in row["replies"].items():
            told = [f"{reply[name]:.2f}" for name in ("reduce_gb_per_s", "decode_gb_per_s", "seconds_of_a_billion")]
            yield (*cells, members, f"{reply['bits_a_weight']:.3f}", *told)


def main() -> None:
    parser = make_parser(__doc__)
    names = [*dict.fromkeys(code.name.lower() for code in COMPRESSIONS.values()), "top_k"]
    parser.add_argument("--codes", nargs="+", choices=names, default=names, help="which ones (all)")
    parser.add_argument("--mib", type=int, default=32, help="MiB of float32 to encode in one pass (32)")
    parser.add_argument("--passes", type=int, default=5, help="passes, of which the best counts (5)")
    options = parser.parse_args()
    if options.mib < 4 or options.passes < 1:
        parser.error("there must be at least 4 MiB and 1 pass")
    make_folder(parser, options.output)
    threads = list(dict.fromkeys((1, torch.get_num_threads())))
    results: dict[str, Any] = machine() | {"torch": torch.__version__, "mib": options.mib, "codes": [], "sparse": None}
    for name in options.codes:
        say(name)
        if name == "top_k":
            torch.set_num_threads(1)
            results["sparse"] = {"rows": [sparse_speeds(top_k, options.mib, options.passes) for top_k in SPARSE]}
        else:
            results["codes"].append(measure(CompressionType[name.upper()], threads, options.mib, options.passes))
    write(options.output / "codecs.json", results)
    if results["codes"]:
        show(
            results,
            "Codes: GB/s of float32, and errors in standard deviations",
            CODES_HEADER,
            [*code_rows(results["codes"])],
        )
    if results["sparse"]:
        rows = [*sparse_rows(results["sparse"]["rows"])]
        show(results, "TOP_K: GB/s of float32 on one core, and bits a weight", SPARSE_HEADER, rows)


if __name__ == "__main__":
    main()
