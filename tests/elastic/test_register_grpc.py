"""The register over gRPC: histories under cuts, who may call, what grpcurl sees."""

import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from averaging.elastic.register import MAX_VALUE_BYTES, GrpcRegister, Register, RegisterService
from averaging.errors import CallRefusedError
from averaging.rpc import RpcChannel, RpcServer, read_credentials
from tests.elastic.linearizability import Recorder, is_linearizable, periodic_faults
from tests.support.certificates import token_file
from tests.support.fault_proxy import FaultProxy

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.mark.parametrize("seed", range(3))
async def test_histories_of_callers_that_are_cut_off_are_linearizable(seed: int) -> None:
    rng, recorder = random.Random(seed), Recorder()
    with FaultProxy() as proxy:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(RpcServer(f"127.0.0.1:{proxy.target}", [RegisterService()]))
            registers: list[Register] = []
            for _ in range(4):
                channel = await stack.enter_async_context(RpcChannel(f"127.0.0.1:{proxy.port}"))
                registers.append(GrpcRegister(channel, timeout=0.3))
            await recorder.run(registers, rng, calls=20, between=periodic_faults(proxy, rng, 100))
            proxy.heal()
    assert recorder.failures
    assert sum(operation.done for operation in recorder.history) > 2
    assert is_linearizable(recorder.history)


async def test_a_state_of_a_thousand_nodes_fits_and_larger_ones_are_refused() -> None:
    async with RpcServer("127.0.0.1:0", [RegisterService()]) as server, RpcChannel(server.endpoint) as channel:
        register = GrpcRegister(channel)
        large = random.Random(0).randbytes(MAX_VALUE_BYTES)
        written = await register.compare_and_set("k", large, None)
        assert written.done
        assert await register.get("k") == written.entry
        with pytest.raises(CallRefusedError, match="at most"):
            await register.compare_and_set("k", large + b"x", written.entry.token if written.entry else None)
        with pytest.raises(CallRefusedError, match="a key of"):
            await register.get("k" * 300)
        assert await register.get("nothing") is None


async def test_a_stranger_can_neither_read_nor_write(tmp_path: Path) -> None:
    credentials = read_credentials(token_file=token_file(tmp_path))
    async with (
        RpcServer("127.0.0.1:0", [RegisterService()], credentials=credentials) as server,
        RpcChannel(server.endpoint) as stranger,
        RpcChannel(server.endpoint, credentials=credentials) as node,
    ):
        for call in (GrpcRegister(stranger).get("k"), GrpcRegister(stranger).compare_and_set("k", b"", None)):
            with pytest.raises(CallRefusedError, match="token"):
                await call
        assert (await GrpcRegister(node).compare_and_set("k", b"", None)).done
