"""What a peer that was asked to leave still does, and who may ask it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Outcome, Peer, control
from averaging.control import LEAVE, LEAVE_REQUEST, LeaveStep, step_of
from averaging.errors import CallRefusedError, PeerUnreachableError, RefusalCause
from averaging.peer import PeerContext
from averaging.rpc import Credentials, RpcChannel
from tests.support import certificates
from tests.support.grpc_fakes import client
from tests.support.processes import DEADLINE


class Leaver:
    """A peer that leaves when it is asked to."""

    def __init__(self, **options: Any) -> None:
        self._asked = asyncio.Event()
        self._options: dict[str, Any] = {"run_id": "run", "group_size": 2, "group_wait": 20.0} | options
        self.left = False

    @asynccontextmanager
    async def running(self, size: int = 5) -> AsyncIterator[Peer]:
        tensors = [torch.ones(size)]
        async with asyncio.TaskGroup() as tasks:
            entered: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
            tasks.create_task(self._run(tensors, entered))
            yield await entered
            self._asked.set()

    async def _run(self, tensors: list[torch.Tensor], entered: asyncio.Future[Peer]) -> None:
        async with Peer(tensors, context=PeerContext(on_leave=self._asked.set), **self._options) as peer:
            entered.set_result(peer)
            await self._asked.wait()
        self.left = True


async def ask(endpoint: str, credentials: Credentials | None = None) -> list[LeaveStep]:
    """Asks a peer to leave; returns the steps when it has left."""
    steps = []
    async with (
        RpcChannel(endpoint, credentials=credentials) as channel,
        aclosing(channel.stream(LEAVE, LEAVE_REQUEST)) as replies,
    ):
        async for reply in replies:
            assert reply.endpoint == endpoint
            assert reply.run_id == "run"
            steps.append(step_of(reply))
    return steps


async def reached(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


async def until(peer: Peer, step: LeaveStep) -> None:
    async with aclosing(peer._lifecycle.control.departure.steps()) as steps:
        async for now in steps:
            if now >= step:
                return


async def test_a_round_in_progress_ends_and_no_other_begins() -> None:
    leaver = Leaver(non_finite="allow")  # so that only the write of the result takes the lock
    options: dict[str, Any] = {"run_id": "run", "group_size": 2, "non_finite": "allow"}
    async with asyncio.timeout(DEADLINE), leaver.running() as peer:  # noqa: SIM117
        async with Peer([torch.zeros(5)], join=[peer.endpoint], **options) as other:
            await reached(lambda: peer.endpoint in other.peers and other.endpoint in peer.peers)
            with peer.tensors():  # its result cannot be written now
                rounds = [asyncio.create_task(peer.average()), asyncio.create_task(other.average())]
                await reached(lambda: peer._entered.service.round is not None)
                leaving = asyncio.create_task(ask(peer.endpoint))
                await until(peer, LeaveStep.ROUND)
                theirs = await rounds[1]
                assert not leaving.done()
                assert peer.leaves
            ours = await rounds[0]
            assert [step for step in await leaving if step is LeaveStep.LEFT] == [LeaveStep.LEFT]
            assert (ours.outcome, theirs.outcome) == (Outcome.AVERAGED, Outcome.AVERAGED)
            assert ours.dropped == theirs.dropped == ()
            assert theirs.left == ()
            alone = await other.average(search_timeout=0.3)
            assert alone.outcome is Outcome.NO_GROUP
            assert alone.left == (ours.endpoint,)
            assert (await other.average(search_timeout=0.3)).left == ()
    assert leaver.left


async def test_a_search_ends_and_later_rounds_wait_for_the_end() -> None:
    async with asyncio.timeout(DEADLINE), Leaver().running() as peer:
        search = asyncio.create_task(peer.average())
        await reached(lambda: peer.status.looking)
        steps = await ask(peer.endpoint)
        assert steps[-1] is LeaveStep.LEFT
        receipt = await search
        assert receipt.outcome is Outcome.NO_GROUP
        assert receipt.reason == "this peer leaves its run, as it was asked to"


async def test_newcomers_finish_their_download_and_are_sent_to_other_donors() -> None:
    size = 8 << 20  # more than the buffers on the way hold
    async with asyncio.timeout(DEADLINE), Leaver().running(size) as peer, client() as reader:  # noqa: SIM117
        async with Peer([torch.zeros(size)], run_id="run", join=[peer.endpoint]) as newcomer:
            await reached(lambda: bool(newcomer.donors))
            async with aclosing(reader.download_state(peer.endpoint)) as messages:
                received = [await anext(messages)]
                leaving = asyncio.create_task(ask(peer.endpoint))
                await until(peer, LeaveStep.DOWNLOADS)
                await reached(lambda: not newcomer.donors)
                assert not leaving.done()
                received += [message async for message in messages]
            assert sum(len(message.tensor_part.buffer) for message in received if message.tensor_part) == 4 * size
            assert (await leaving)[-1] is LeaveStep.LEFT


async def test_only_a_peer_whose_program_can_end_it_serves_the_method() -> None:
    async with asyncio.timeout(DEADLINE), Peer([torch.ones(5)], run_id="run") as peer:
        with pytest.raises(CallRefusedError) as refused:
            await ask(peer.endpoint)
        assert refused.value.cause is RefusalCause.NOT_SERVED


def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no caller is on this machine."""
    monkeypatch.setattr(control, "is_own", lambda host: False)


@pytest.mark.parametrize("token", [False, True])
async def test_a_stranger_and_another_member_cannot_end_a_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: bool
) -> None:
    stranger(monkeypatch)
    options = {"token_file": tmp_path / "token"} if token else {}
    (tmp_path / "token").write_text(certificates.TOKEN)
    credentials = Credentials(tokens=(certificates.TOKEN,) if token else ())
    async with asyncio.timeout(DEADLINE), Leaver(**options).running() as peer:
        with pytest.raises(CallRefusedError, match="a peer is ended on its own machine;"):
            await ask(peer.endpoint, credentials)
        assert not peer.leaves


async def test_without_the_token_not_even_a_caller_on_its_machine_may(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(certificates.TOKEN)
    async with asyncio.timeout(DEADLINE), Leaver(token_file=tmp_path / "token").running() as peer:
        with pytest.raises(CallRefusedError, match="requires a token"):
            await ask(peer.endpoint)
        assert not peer.leaves
        assert (await ask(peer.endpoint, Credentials(tokens=(certificates.TOKEN,))))[-1] is LeaveStep.LEFT


async def test_a_certificate_for_its_host_may_end_a_peer_and_another_one_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger(monkeypatch)
    files = certificates.write(tmp_path, *certificates.HERE)
    async with asyncio.timeout(DEADLINE), Leaver(**files).running() as peer:
        for other in (certificates.secure("192.0.2.9"), certificates.secure()):
            with pytest.raises(CallRefusedError, match="on its own machine or with a certificate for its host"):
                await ask(peer.endpoint, other)
        with pytest.raises(PeerUnreachableError, match="with one authority"):
            await ask(peer.endpoint, certificates.secure(*certificates.HERE, of="other"))
        assert not peer.leaves
        assert (await ask(peer.endpoint, certificates.secure("127.0.0.1")))[-1] is LeaveStep.LEFT


async def test_a_caller_over_ipv6_on_its_machine_may_end_a_peer() -> None:
    async with asyncio.timeout(DEADLINE), Leaver(listen="[::1]:0").running() as peer:
        assert (await ask(peer.endpoint))[-1] is LeaveStep.LEFT
