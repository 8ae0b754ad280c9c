"""The order of all checks: first those of this machine, then those of each peer to join, several peers at a time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from averaging.common import CLIENT_PREFIX, SourceKind, counted, is_endpoint, is_loopback, parse_address, parse_seed
from averaging.config import PeerConfig
from averaging.discovery.etcd import EtcdDiscovery
from averaging.doctor import this_machine, tls
from averaging.doctor.deep import DeepCheck, measure_paths
from averaging.doctor.dial_back import DialListener
from averaging.doctor.findings import Finding, Severity, ok, told, warning
from averaging.doctor.memory import check_memory, free_memory, free_memory_of_gpu
from averaging.doctor.other_peer import Visit, compare_peers, running_peer, visit
from averaging.errors import AveragingError, ConfigError, DiscoveryError, ProtocolViolationError
from averaging.protocol import Mode
from averaging.security import Credentials, Tls, read_tokens
from averaging.seeds import FoundSeeds, Seeds
from averaging.transport.grpc import Dialling

if TYPE_CHECKING:
    from averaging.tensors import Schema

MAX_VISITED = 8
"""Peers that are asked of those that etcd names."""

Report: TypeAlias = "Callable[[Finding], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What `averaging doctor` is asked.

    Attributes:
        config: The options of the peer that will be started; `join` has the peers to ask.
        run_known: Whether the user has given a run id. `config.run_id` is a placeholder otherwise.
        schema: What this peer will average; None if it is not known.
        strategy: Name of its strategy; empty if that is not known.
        memory: Bytes that it will hold, by what they hold; empty if that is not known.
        deep: Whether the paths to the peers are measured.
        idle: For how many seconds connections are left idle then, at most; 0 for not at all.
    """

    config: PeerConfig
    run_known: bool = True
    schema: Schema | None = None
    strategy: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    deep: bool = False
    idle: float = 0.0


async def examine(examination: Examination, report: Report, tell: Callable[[str], None] = lambda _: None) -> None:
    """Makes all checks, and reports each finding as it is made.

    Args:
        examination: What to check.
        report: Called with each finding, in the order of the documentation.
        tell: Called with what takes longer, before it begins.
    """
    config = examination.config
    own, findings = tls.check_certificate(config, time.time())
    exposed = config.tls_cert is not None or config.insecure
    credentials = _credentials(config, own)
    port = await this_machine.check_port(config, exposed=exposed)
    if port[0].severity is not Severity.OK and (running := await running_peer(config, credentials)):
        port = [running]
    seeds, found = await (_ask_etcd if config.etcd else _look_up)(config, credentials)
    for finding in (
        *this_machine.check_software(),
        *this_machine.check_system(),
        *port,
        *await this_machine.check_listen_host(config, seeds),
        *await this_machine.check_advertise(config),
        *this_machine.check_families(),
        *findings,
        *tls.check_token_file(config),
        *_memory(examination),
        *this_machine.check_fork(),
        *this_machine.check_proxies(config.proxy),
        *this_machine.check_open_files(),
        *this_machine.check_processors(),
        *this_machine.check_clock(),
        *found,
    ):
        report(finding)
    if seeds:
        free = all(finding.severity is Severity.OK for finding in port)
        await _visit_all(examination, seeds, credentials, report, tell, free=free)


def _memory(examination: Examination) -> list[Finding]:
    if not examination.memory:
        return []
    return check_memory(examination.memory, free_memory(), free_memory_of_gpu())


async def _look_up(config: PeerConfig, credentials: Credentials | None) -> tuple[dict[str, str], list[Finding]]:
    """The addresses of the peers to join, and what sources such as `dns:` have answered.

    Returns:
        For each address the host for which its certificate must be valid, empty for its own; and the findings.
    """
    found: list[FoundSeeds] = []
    sources = {text: parse_seed(text) for text in config.join}
    in_etcd = [text for text, source in sources.items() if source and source.kind is SourceKind.ETCD]
    named = Seeds([text for text in config.join if text not in in_etcd], on_found=found.append)
    # Not bound to this peer, which would write its address there.
    written = Seeds(in_etcd, credentials, on_found=found.append)
    endpoint = config.advertise or config.listen
    if config.mode is not Mode.CLIENT and parse_address(endpoint)[1]:
        named.bind(endpoint, config.listen)
    findings: list[Finding] = []
    try:
        for seeds in (named, written):
            await seeds.look_up()
    except ConfigError as error:
        findings.append(told("join", error))
    finally:
        await written.close()
    findings += map(_judge_source, found)
    addresses = {address: named.names.get(address, "") for address in named.addresses}
    dialling = Dialling(loopback=is_loopback(parse_address(endpoint)[0]), remedy="")
    for address in written.addresses:
        try:
            await dialling.check(address)  # others have written it
        except ProtocolViolationError as error:
            findings.append(warning("join", str(error), "remove it from etcd, and correct advertise there"))
        else:
            if address != endpoint:
                addresses.setdefault(address, "")
    return addresses, findings


async def _ask_etcd(config: PeerConfig, credentials: Credentials | None) -> tuple[dict[str, str], list[Finding]]:
    """Some peers that etcd names, and whether it answers. Nothing is written there but a lease."""
    if credentials is None:
        return {}, []  # another finding says why
    client = f"{CLIENT_PREFIX}{uuid.uuid4()}"
    try:
        async with EtcdDiscovery.from_config(config, client, credentials) as discovery:
            names = sorted(name for name in discovery.endpoints() if can_be_called(name))
            refused = sum(discovery.refused.values())
    except AveragingError as error:
        return {}, [told("discovery", error)]
    found = f"{config.discovery} answers: {counted(len(names), 'peer')} of run {config.run_id!r}"
    findings = [ok("discovery", f"{found}, of which {MAX_VISITED} are asked" if len(names) > MAX_VISITED else found)]
    if refused:
        remedy = "compare the tokens and the certificate authority with those of the other peers"
        findings.append(warning("discovery", f"{counted(refused, 'record')} there cannot be accepted", remedy))
    return dict.fromkeys(names[:MAX_VISITED], ""), findings


def can_be_called(name: str) -> bool:
    """Whether a name in discovery is the endpoint of a peer that listens."""
    return is_endpoint(name) and not name.startswith(CLIENT_PREFIX)


def _judge_source(found: FoundSeeds) -> Finding:
    if found.failure:
        return told("join", DiscoveryError(str(found)))
    if not found.addresses:
        return warning("join", str(found), "start further peers, or correct the source")
    return ok("join", str(found))


def _credentials(config: PeerConfig, own: Tls | None) -> Credentials | None:
    """What this peer would call others with; None if its files cannot be used."""
    if own is None and config.tls_cert is not None:
        return None
    try:
        return Credentials(tls=own, tokens=read_tokens(config.token_file))
    except ConfigError:
        return None


async def _visit_all(
    examination: Examination,
    seeds: Mapping[str, str],
    credentials: Credentials | None,
    report: Report,
    tell: Callable[[str], None],
    *,
    free: bool,
) -> None:
    config = examination.config
    async with _listening(config, free=free) as listener:
        visits = [
            Visit(
                *(seed, config, credentials, listener, examination.run_known, examination.schema),
                certified_host=certified_host,
                strategy=examination.strategy,
            )
            for seed, certified_host in seeds.items()
        ]
        try:
            await _report_in_order(visits, report)
            for finding in compare_peers(visits):
                report(finding)
        finally:
            for each in visits:
                await each.close()
    if examination.deep and credentials is not None:
        for each in visits:
            if each.proxied:
                text = "not measured, since the peer is called through a proxy"
                report(warning("packets", text, "leave the proxy out to measure the way without it", each.seed))
        paths = [
            DeepCheck(each.seed, each.address, each.endpoint, each.certified_host, credentials, config, tell)
            for each in visits
            if each.address
        ]
        await measure_paths(paths, examination.idle, report)


async def _report_in_order(visits: Sequence[Visit], report: Report) -> None:
    """Asks all peers at the same time. Findings of the first are reported as they are made, then those of the next."""

    async def fill(each: Visit, queue: asyncio.Queue[Finding | None]) -> None:
        async for finding in visit(each):
            queue.put_nowait(finding)
        queue.put_nowait(None)

    queues: list[asyncio.Queue[Finding | None]] = [asyncio.Queue() for _ in visits]
    async with asyncio.TaskGroup() as tasks:
        for each, queue in zip(visits, queues, strict=True):
            tasks.create_task(fill(each, queue))
        for queue in queues:
            while (finding := await queue.get()) is not None:
                report(finding)


@asynccontextmanager
async def _listening(config: PeerConfig, *, free: bool) -> AsyncIterator[DialListener | None]:
    """Listens on `listen` for the calls back, if no peer does so already."""
    if config.mode is Mode.CLIENT or not free:
        yield None
        return
    try:
        listener = DialListener(config.listen, tls.server_context(config))
        await listener.__aenter__()
    except OSError:
        yield None
        return
    try:
        yield listener
    finally:
        await listener.__aexit__()
