"""The register in memory, and the checker of histories itself."""

import asyncio
import random

import pytest

from averaging.elastic import register as limits
from averaging.elastic.register import MemoryRegister, RegisterEntry, SwapResult
from averaging.errors import BusyError, PeerUnreachableError, ProtocolViolationError
from tests.elastic.linearizability import Recorder, is_linearizable


class Lossy:
    """A register behind a network that takes its time, and loses requests and answers."""

    def __init__(self, register: MemoryRegister, rng: random.Random, loss: float = 0.1) -> None:
        self._register, self._rng, self._loss = register, rng, loss

    async def get(self, key: str) -> RegisterEntry | None:
        await self._pass()
        entry = await self._register.get(key)
        await self._pass()
        return entry

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        await self._pass()
        written = await self._register.compare_and_set(key, value, token)
        await self._pass()
        return written

    async def _pass(self) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        if self._rng.random() < self._loss:
            raise PeerUnreachableError("register", "lost")


@pytest.mark.parametrize("seed", range(30))
async def test_histories_in_memory_are_linearizable(seed: int) -> None:
    rng, register, recorder = random.Random(seed), MemoryRegister(), Recorder()
    await recorder.run([Lossy(register, rng) for _ in range(5)], rng, calls=12)
    assert recorder.failures
    assert sum(operation.done for operation in recorder.history) > 2
    assert is_linearizable(recorder.history)


async def test_no_token_of_another_process_fits() -> None:
    first, second = MemoryRegister(), MemoryRegister()
    entry = (await first.compare_and_set("k", b"a", None)).entry
    assert entry is not None
    other = await second.compare_and_set("k", b"b", None)
    written = await second.compare_and_set("k", b"c", entry.token)
    assert written == SwapResult(other.entry, done=False)


async def test_an_entry_is_forgotten_long_after_its_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENTRIES", 2)
    now = [0.0]
    register = MemoryRegister(lambda: now[0])
    one = await register.compare_and_set("one", b"", None)
    await register.compare_and_set("two", b"", None)
    with pytest.raises(BusyError, match="the register is full: it has 2 entries, the maximum"):
        await register.compare_and_set("three", b"", None)
    now[0] = limits.LIFETIME - 1
    assert one.entry is not None
    assert (await register.compare_and_set("one", b"again", one.entry.token)).done
    now[0] = limits.LIFETIME + 1
    assert (await register.compare_and_set("three", b"", None)).done
    assert register._total == len(b"again")
    assert await register.get("two") is None
    assert await register.get("one") is not None
    now[0] = 3 * limits.LIFETIME  # nobody writes, and it goes all the same
    assert await register.get("one") is None
    assert register._total == 0


async def test_keys_and_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    register = MemoryRegister()
    for key in ("", "k" * 257):
        with pytest.raises(ProtocolViolationError, match="a key of"):
            await register.get(key)
    with pytest.raises(ProtocolViolationError, match="a value of"):
        await register.compare_and_set("k", bytes(limits.MAX_VALUE_BYTES + 1), None)
    monkeypatch.setattr(limits, "MAX_TOTAL_BYTES", 10)
    await register.compare_and_set("a", bytes(8), None)
    with pytest.raises(BusyError, match="its 1 entries have 8 bytes, and at most 10 are kept"):
        await register.compare_and_set("b", bytes(3), None)
