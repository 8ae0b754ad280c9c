"""Measures speed and error of each compression, and up to which link speed it pays.

Speeds are GB of float32 per second, the best of several passes over parts of the default size, as in a round. Errors
are those of one encoding, in units of the data's standard deviation: the maximum, and the root mean square. The
heavy-tailed values have Student's t distribution with 3 degrees of freedom.

A compression pays on links slower than B. "One after the other" means that a part is encoded, sent and decoded before
the next one begins: B < (1 - c/4) / (1/encode + 1/decode) with c bytes per element. "Overlapped" means that the
processor works on one part while another is sent, as in this library's rounds if cores are free:
B < min(encode, decode).

    python -m benchmarks.codecs            # a minute; the results go to codecs.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from averaging.config import DEFAULT_PART_SIZE_BYTES
from averaging.protocol.messages import CompressionType
from averaging.tensors.compression import bytes_per_element, decode, encode
from benchmarks.allreduce.report import machine
from benchmarks.output import make_folder, write
from benchmarks.workers import ROOT, say

FLOAT_BYTES = 4


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


def best_seconds(work: Callable[[], object], passes: int) -> float:
    """Returns the minimum time of several passes. The first one, which allocates memory, does not count."""
    found = []
    for _ in range(passes + 1):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def speeds(values: torch.Tensor, code: CompressionType, passes: int) -> tuple[float, float]:
    """Returns GB of float32 per second for encoding and decoding."""
    size = DEFAULT_PART_SIZE_BYTES // bytes_per_element(code, values.dtype)
    parts = list(torch.split(values, size))
    packed = [encode(part, code) for part in parts]
    amount = values.numel() * FLOAT_BYTES / 1e9
    encoding = best_seconds(lambda: [encode(part, code) for part in parts], passes)
    decoding = best_seconds(lambda: [decode(wire) for wire in packed], passes)
    return amount / encoding, amount / decoding


def measure(code: CompressionType, threads: Sequence[int], mib: int, passes: int) -> dict[str, Any]:
    """Returns all figures of one compression."""
    data = samples(mib << 18)
    per_element = bytes_per_element(code, torch.float32)
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
        part = values[: DEFAULT_PART_SIZE_BYTES // per_element]
        largest, rms = errors(part, decode(encode(part, code)))
        found["errors"][name] = {"max": largest, "rms": rms}
    return found


def show(results: dict[str, Any]) -> None:
    """Prints the tables."""
    where = results["machine"]
    table = Table(
        title="Codes: GB/s of float32, links below which they pay, and errors in standard deviations",
        caption=f"{where['processor']}, {where['cores']} cores, {where['system']}; torch {torch.__version__}; "
        f"commit {results['commit'][:10]}{results['commit'][40:]}; parts of {DEFAULT_PART_SIZE_BYTES >> 20} MiB",
    )
    for name in ("code", "bytes", "threads", "encode", "decode", "pays below Gbit/s", "overlapped"):
        table.add_column(name, justify="left" if name == "code" else "right")
    for name in ("gaussian", "heavy-tailed"):
        table.add_column(f"{name}: max", justify="right")
        table.add_column("RMS", justify="right")
    for one in results["codes"]:
        lost = [f"{value:.1e}" for kind in one["errors"].values() for value in (kind["max"], kind["rms"])]
        for number, (threads, figures) in enumerate(one["threads"].items()):
            pays = [f"{value:.1f}" if value else "" for value in figures["pays_below_gbit_per_s"].values()]
            table.add_row(
                *((one["code"], str(one["bytes_per_element"])) if not number else ("", "")),
                threads,
                f"{figures['encode_gb_per_s']:.2f}",
                f"{figures['decode_gb_per_s']:.2f}",
                *pays,
                *(lost if not number else []),
            )
    console = Console()
    (console if console.is_terminal else Console(width=170)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [code.name.lower() for code in CompressionType if not code.is_sparse]
    parser.add_argument("--codes", nargs="+", choices=names, default=names, help="which ones (all)")
    parser.add_argument("--mib", type=int, default=32, help="MiB of float32 to encode in one pass (32)")
    parser.add_argument("--passes", type=int, default=5, help="passes, of which the best counts (5)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    options = parser.parse_args()
    if options.mib < 4 or options.passes < 1:
        parser.error("there must be at least 4 MiB and 1 pass")
    make_folder(parser, options.output)
    threads = list(dict.fromkeys((1, torch.get_num_threads())))
    results: dict[str, Any] = machine(ROOT) | {"torch": torch.__version__, "mib": options.mib, "codes": []}
    for name in options.codes:
        say(name)
        results["codes"].append(measure(CompressionType[name.upper()], threads, options.mib, options.passes))
    write(options.output / "codecs.json", results)
    show(results)


if __name__ == "__main__":
    main()
