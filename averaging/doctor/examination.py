"""The order of all checks: those of this machine, the sources of peers, and then one peer to join after the other."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from averaging.common import CLIENT_PREFIX, counted, is_own, parse_address
from averaging.config import PeerConfig
from averaging.discovery.etcd import EtcdDiscovery
from averaging.doctor import this_machine
from averaging.doctor.checks import Finding, failure, finding_of, ok, warning
from averaging.doctor.other_peer import Visit, visit
from averaging.errors import AveragingError, ConfigError
from averaging.protocol import Mode
from averaging.security import Credentials, read_credentials
from averaging.seeds import FoundSeeds, Seeds

if TYPE_CHECKING:
    from averaging.tensors import Schema

MAX_VISITED = 16  # peers that are asked of those that sources name

Report: TypeAlias = "Callable[[Finding], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What `averaging doctor` is asked."""

    config: PeerConfig  # the options of the peer that will be started; `join` has the peers to ask
    run_known: bool = True  # whether the user has given a run id. `config.run_id` is a placeholder otherwise
    schema: Schema | None = None  # what this peer will average; None if it is not known
    strategy: str = ""  # name of its strategy; empty if that is not known
    deep: bool = False  # whether the bandwidth to the peers is measured


async def examine(examination: Examination, report: Report) -> None:
    """Makes all checks, and reports each finding as it is made, in the order of the documentation."""
    config, schema = examination.config, examination.schema
    try:
        credentials: Credentials | None = read_credentials(config, time.time)
    except ConfigError:
        credentials = None  # `certificate` or `token-file` says why
    seeds, found = await (_ask_etcd if config.etcd else _look_up)(config, credentials)
    held = 0 if schema is None else (3 if config.share_state else 2) * schema.nbytes  # with results and a copy
    machine = this_machine.Machine(config=config, credentials=credentials, seeds=seeds, held_bytes=held)
    for check in this_machine.CHECKS:
        if (finding := await check.make(machine)) is not None:
            report(finding)
    for finding in found:
        report(finding)
    known = {"schema": ("here", schema), "strategy": ("here", examination.strategy)}
    known = {what: value for what, value in known.items() if value[1]}
    for seed, certified_host in seeds.items():
        peer = Visit(seed, config, credentials, certified_host, known, examination.run_known)
        async for finding in visit(peer, deep=examination.deep):
            report(finding)


async def _look_up(config: PeerConfig, credentials: Credentials | None) -> tuple[Mapping[str, str], list[Finding]]:
    """Asks sources such as `dns:`.

    Returns:
        For each address to join the host for which its certificate must be valid, empty for its own; and the findings.
    """
    answers: list[FoundSeeds] = []
    # It is bound to no peer, which would write its address into etcd.
    seeds, findings = Seeds(config.join, credentials, on_found=answers.append), list[Finding]()
    try:
        await seeds.look_up()
    except ConfigError as error:
        findings.append(finding_of(error))
    finally:
        await seeds.close()
    findings += map(_judge_source, answers)
    port = 0 if config.mode is Mode.CLIENT else parse_address(config.advertise or config.listen)[1]
    addresses: dict[str, str] = {}
    for address in seeds.addresses:
        host, its_port = parse_address(address)
        if address in config.join or not (its_port == port and is_own(host)):
            addresses[address] = seeds.names.get(address, "")
    if len(addresses) > MAX_VISITED:
        findings.append(warning(f"{len(addresses)} addresses are named, of which {MAX_VISITED} are asked"))
    chosen = dict(list(addresses.items())[:MAX_VISITED])
    return chosen, [replace(finding, check="join") for finding in findings]


def _judge_source(found: FoundSeeds) -> Finding:
    if found.failure:
        return failure(str(found))
    return ok(str(found)) if found.addresses else warning(str(found), "start further peers, or correct the source")


async def _ask_etcd(config: PeerConfig, credentials: Credentials | None) -> tuple[Mapping[str, str], list[Finding]]:
    """Some peers that etcd names, and whether it answers. Nothing is written there but a lease."""
    if credentials is None:
        return {}, []
    client = f"{CLIENT_PREFIX}{uuid.uuid4()}"
    try:
        async with EtcdDiscovery.from_config(config, client, credentials) as discovery:
            names = sorted(name for name in discovery.endpoints() if not name.startswith(CLIENT_PREFIX))
            refused = sum(discovery.refused.values())
    except AveragingError as error:
        return {}, [replace(finding_of(error), check="discovery")]
    text = f"{config.discovery} answers: {counted(len(names), 'peer')} of run {config.run_id!r}"
    findings = [ok(f"{text}, of which {MAX_VISITED} are asked" if len(names) > MAX_VISITED else text)]
    if refused:
        remedy = "compare the tokens and the certificate authority with those of the other peers"
        findings.append(warning(f"{counted(refused, 'record')} there cannot be accepted", remedy))
    return dict.fromkeys(names[:MAX_VISITED], ""), [replace(finding, check="discovery") for finding in findings]
