"""Freed memory is kept where glibc can be configured."""

import os
import subprocess
import sys

import pytest

from averaging.common.malloc import keep_freed_memory

FAULTS = """
import resource, sys
from averaging.common.malloc import keep_freed_memory

assert keep_freed_memory(1 << 29)
def use():
    blocks = [bytearray(b"1") * (1 << 20) for _ in range(128)]
    while blocks:
        blocks.pop()  # from the end of the heap, where glibc returns memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
before = faults()
for _ in range(3):
    use()
print(faults() - before)
"""


def test_freed_memory_is_reused_without_page_faults() -> None:
    env = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) < 1000  # of the 98,304 pages of three times 128 MiB


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")]
)
def test_settings_in_the_environment_take_precedence(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
