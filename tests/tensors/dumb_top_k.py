"""TOP_K written down a second time, slowly and element by element, as a reference for tests."""

import struct

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def blocks_of(values: Array) -> list[list[tuple[int, ...]]]:
    """The coordinates of the elements of each block, in tile order."""
    if values.ndim < 2:
        places: list[tuple[int, ...]] = [(i,) for i in range(values.size)] if values.ndim else [()]
        return [places[start : start + 4096] for start in range(0, len(places), 4096)]
    rows, columns = values.shape[0], int(np.prod(values.shape[1:]))
    groups: list[list[list[tuple[int, int]]]] = [[], [], [], []]
    for top in range(0, rows, 64):
        for left in range(0, columns, 64):
            block = [
                (row, column)
                for row in range(top, min(top + 64, rows))
                for column in range(left, min(left + 64, columns))
            ]
            groups[2 * (rows - top < 64) + (columns - left < 64)].append(block)
    return [
        [(row, *map(int, np.unravel_index(column, values.shape[1:]))) for row, column in block]
        for group in groups
        for block in group
    ]


def chosen(block: Array, k: int) -> list[int]:
    """The k largest magnitudes, ascending; no two magnitudes are equal."""
    return sorted(sorted(range(len(block)), key=lambda i: -abs(float(block[i])))[:k])


def quantised(values: Array, bits: int) -> tuple[Array, list[int]]:
    """The table and the codes."""
    bins = 2**bits
    if len(values) <= bins:
        return np.concatenate([values, np.zeros(bins - len(values), np.float32)]), list(range(len(values)))
    exact = [float(value) for value in values]
    mean = float(np.mean(values, dtype=np.float64))
    std = float(np.std(values.astype(np.float64), ddof=1))
    codes = []
    for value in exact:
        number = round((value - mean) / (6 * std / bins)) + bins // 2 if std else bins // 2
        codes.append(min(max(number, 0), bins - 1))
    table = [[value for value, code in zip(exact, codes, strict=True) if code == bin] for bin in range(bins)]
    return np.array([sum(held) / len(held) if held else 0.0 for held in table], np.float32), codes


def packed(numbers: list[int], bits: int) -> bytes:
    """Numbers one after the other, each from its lowest bit on, in as few bytes as hold them."""
    whole = 0
    for place, number in enumerate(numbers):
        whole |= number << (place * bits)
    return whole.to_bytes(-(-len(numbers) * bits // 8), "little")


def part_bytes(indices: list[int], table: Array, codes: list[int], bits: int) -> bytes:
    """A part: the indices within blocks and the codes of its kept values."""
    if len(codes) < 2**bits:
        return b"".join(struct.pack("<f", table[code]) for code in codes) + packed(indices, 12)
    return table.astype("<f4").tobytes() + packed(indices, 12) + packed(codes, bits)
