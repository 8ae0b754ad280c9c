"""The register in a real etcd: histories under cuts, a job through it, who may call."""

import asyncio
import random
import signal
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from averaging import AveragingError, TLSFiles
from averaging.elastic.handler import create_handler
from averaging.elastic.register import Register
from averaging.elastic.session import EtcdRegister
from averaging.errors import PeerUnreachableError
from averaging.rpc import Credentials, RpcChannel, read_credentials
from tests.elastic.jobs import Job
from tests.elastic.linearizability import Recorder, is_linearizable, periodic_faults
from tests.etcd.conftest import Etcd
from tests.support.fault_proxy import FaultProxy
from tests.support.ports import free_port

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]


def credentials(etcd: Etcd) -> Credentials:
    return read_credentials(tls=TLSFiles(etcd.files["tls_ca"], etcd.files["tls_cert"], etcd.files["tls_key"]))


async def up(register: Register) -> None:
    """Returns when the server answers."""
    async with asyncio.timeout(30):
        while True:
            try:
                await register.get("up")
                return
            except PeerUnreachableError:
                await asyncio.sleep(0.1)


async def test_an_entry_goes_some_time_after_its_last_write(etcd: Etcd) -> None:
    now = [0.0]
    async with RpcChannel(f"127.0.0.1:{etcd.port}", credentials=credentials(etcd)) as channel:
        register = EtcdRegister([channel], lifetime=1.0, monotonic=lambda: now[0])
        await up(register)
        written = await register.compare_and_set("k", b"1", None)
        assert written.entry is not None
        now[0] = 1.0  # so the next write has a lease of its own, and the end of the first one means nothing
        longer = EtcdRegister([channel], lifetime=60.0)
        kept = await longer.compare_and_set("k", b"2", written.entry.token)
        gone = await register.compare_and_set("other", b"1", None)
        assert gone.done
        async with asyncio.timeout(30):
            while await register.get("other") is not None:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.2)
        assert await register.get("k") == kept.entry
        with pytest.raises(AveragingError, match="lease"):  # as after this machine has slept
            await register.compare_and_set("other", b"2", None)
        assert (await register.compare_and_set("other", b"3", None)).done


@pytest.mark.parametrize("seed", range(3))
async def test_histories_of_callers_that_are_cut_off_are_linearizable(etcd: Etcd, seed: int) -> None:
    rng, recorder = random.Random(seed), Recorder()
    with FaultProxy() as proxy:
        proxy.target = etcd.port
        async with AsyncExitStack() as stack:
            registers: list[Register] = []
            for _ in range(4):
                channel = RpcChannel(f"127.0.0.1:{proxy.port}", credentials=credentials(etcd))
                registers.append(EtcdRegister([await stack.enter_async_context(channel)], timeout=0.5))
            await up(registers[0])
            await recorder.run(registers, rng, calls=20, between=periodic_faults(proxy, rng, 400))
            proxy.heal()
    assert recorder.failures
    assert sum(operation.done for operation in recorder.history) > 2
    assert is_linearizable(recorder.history)


async def test_without_a_certificate_nobody_is_heard(etcd: Etcd) -> None:
    async with RpcChannel(f"127.0.0.1:{etcd.port}", credentials=credentials(etcd)) as channel:
        await up(EtcdRegister([channel]))
    parameters = RendezvousParameters("averaging", f"etcd://127.0.0.1:{etcd.port}", "job", 1, 1, join_timeout=2)
    handler = create_handler(parameters)
    try:
        with pytest.raises(RendezvousConnectionError, match="no register answers at etcd://"):
            handler.next_rendezvous()
    finally:
        handler.shutdown()


def test_a_job_meets_in_etcd_and_trains_on_while_that_is_stopped(etcd: Etcd, tmp_path: Path) -> None:
    endpoint = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{etcd.port}"
    with ExitStack() as stack:
        job = Job(stack, tmp_path, "2", endpoint=endpoint, conf=etcd.files, max_restarts=0)
        nodes = [job.node(), job.node()]
        step = nodes[0].until_step(5, world=2)["step"]
        etcd.process.send_signal(signal.SIGSTOP)
        step = nodes[0].until_step(step + 100, world=2)["step"]
        etcd.process.send_signal(signal.SIGCONT)
        nodes[0].until_step(step + 100)
        job.finish(*nodes)
        assert all(node.starts() == [(2, 0)] for node in nodes)
