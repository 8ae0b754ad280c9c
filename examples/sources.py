"""The text of the demo: the Python standard library's own sources, in disjoint parts."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3"}
"""Directories that are excluded: tests, installed packages, and long generated tables."""

HELD_OUT_EVERY = 8
"""Every eighth of the sorted files is held out, so that the held-out text covers the topics of all parts."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of the text, in disjoint sets.

    Attributes:
        parts: blocks of consecutive files with about equally many bytes, so that each part has other topics.
        held_out: not used in training.
    """

    parts: tuple[tuple[Path, ...], ...]
    held_out: tuple[Path, ...]


def standard_library() -> list[Path]:
    """Returns the sources of the running Python's standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))


def describe(files: tuple[Path, ...]) -> str:
    """Describes files by the first and the last one."""
    root = Path(sysconfig.get_path("stdlib"))
    return f"{files[0].relative_to(root)} … {files[-1].relative_to(root)}"


def divide(files: list[Path], parts: int) -> Sources:
    """Sets files aside as held-out, and divides the others into `parts` blocks of consecutive files."""
    blocks, held_out = partition([path.stat().st_size for path in files], parts)
    return Sources(
        tuple(tuple(files[place] for place in block) for block in blocks), tuple(files[place] for place in held_out)
    )


def partition(sizes: Sequence[int], parts: int) -> tuple[list[list[int]], list[int]]:
    """Divides files of these sizes; returns the indices of each block, and those of the held-out files."""
    held_out = list(range(len(sizes)))[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    others = [place for place in range(len(sizes)) if (place + 1) % HELD_OUT_EVERY]
    total, before = sum(sizes[place] for place in others), 0
    blocks: list[list[int]] = [[] for _ in range(parts)]
    for place in others:
        blocks[min(parts * before // max(1, total), parts - 1)].append(place)
        before += sizes[place]
    return blocks, held_out
