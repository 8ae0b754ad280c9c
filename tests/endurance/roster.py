"""Which processes a run has: three runs of peers, followers of weights, and reinforcement learning.

| part | processes |
|---|---|
| `gradients` | 3 peers and a client that train with `GradientAveraging`; one peer and the client are at the far host |
| `local` | 3 peers, a client and an auxiliary that train with `LocalSGD` and find each other through etcd |
| `sites` | 2 sites with FSDP2 of 2 ranks each, with `GradientAveraging` |
| `weights` | 6 followers of the weights that a peer of `gradients` publishes, in a tree |
| `rollouts` | a synchronizer, a learner, 2 explorers that are environments of a feed, and the feed |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from examples.ports import is_free
from tests.endurance.actors import HOST_KINDS, Actor, System, ports, python
from tests.endurance.hosts import Disk, EtcdCluster, Hosts
from tests.endurance.plan import FaultKind, Target
from tests.endurance.trainer import BATCH, Model
from tests.support.fault_proxy import FaultProxy

PARTS = ("gradients", "local", "sites", "weights", "rollouts")

GROUP_WAIT, STALL_TIMEOUT = 2.0, 5.0

TOKEN = "endurance-0123456789"

Command = Callable[[int], Sequence[tuple[Sequence[str], Mapping[str, str]]]]


class Roster:
    """Makes the actors.

    Args:
        stack: ends the proxies.
        folder: for certificates and other files.
        only: the parts that run.
        pause: seconds that a training step takes without the averaging.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        hosts: Hosts,
        disk: Disk,
        etcd: EtcdCluster | None,
        files: Mapping[str, Path],
        only: Collection[str],
        pause: float,
    ) -> None:
        self._stack, self._folder, self._hosts, self._disk, self._etcd = stack, folder, hosts, disk, etcd
        self._pause = pause
        self._files = {name: str(path) for name, path in files.items()}
        self.actors: list[Actor] = []
        self.endpoints: dict[str, str] = {}
        if "gradients" in only or "weights" in only:
            self._gradients()
        if "local" in only:
            self._local()
        if "sites" in only:
            self._sites()
        if "weights" in only:
            self._followers()
        if "rollouts" in only:
            self._rollouts()

    def _proxies(self, count: int) -> list[FaultProxy]:
        return [self._stack.enter_context(FaultProxy(host=self._hosts.home)) for _ in range(count)]

    def _add(self, name: str, plane: str, command: Command, **options: Any) -> None:
        self.actors.append(Actor(name, plane, command, self._hosts, **options))

    def _averager(self, **options: Any) -> dict[str, Any]:
        return {
            "group_wait": GROUP_WAIT,
            "round_timeout": 30.0,
            "stall_timeout": STALL_TIMEOUT,
            "part_size_bytes": 1 << 14,
            "join_timeout": 30.0,
            **self._files,
            **options,
        }

    def _peer(self, name: str, run: str, options: Mapping[str, Any], join: Sequence[str], *, far: bool = False) -> None:
        """A peer that trains in one process; a client if its name ends in `client`."""
        proxies: list[FaultProxy] = []
        if name.endswith("client"):
            where: dict[str, Any] = {"mode": "client"}
        elif far and self._hosts.far:
            port, direct = ports(2)
            address = f"{self._hosts.far_address}:{port}"
            where = {"listen": address, "direct_listen": f"{self._hosts.far_address}:{direct}"}
        else:
            proxies = self._proxies(2)
            grpc, direct_proxy = proxies
            address = f"{self._hosts.home}:{grpc.port}"
            where = {
                "listen": f"{self._hosts.home}:{grpc.target}",
                "advertise": address,
                "direct_listen": f"{self._hosts.home}:{direct_proxy.target}",
                "direct_advertise": direct_proxy.port,
            }
        if not name.endswith("client"):
            self.endpoints[name] = address

        def command(life: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
            others = [self.endpoints[other] for other in join if other != name and other in self.endpoints]
            averager = {**options["averager"], **where}
            if "discovery" not in averager:
                # The first peer begins the run; when it comes back it joins the others.
                averager["join"] = [] if (life, name) == (1, join[0]) else others
            return [
                (python("tests.endurance.trainer", {**options, "run": run, "life": life, "averager": averager}), {})
            ]

        self._add(name, run, command, proxies=proxies, far=far and bool(self._hosts.far), slot=options["slot"])

    def _gradients(self) -> None:
        names = ["g0", "g1", "g2", "g-client"]
        for slot, name in enumerate(names):
            options = {
                "slot": slot,
                "slots": len(names),
                "strategy": "gradients",
                "target": 2 * BATCH * len(names),
                "publishes": name == "g0",
                "pause": self._pause,
                "averager": self._averager(),
            }
            self._peer(name, "gradients", options, names[:3], far=name in ("g2", "g-client"))

    def _local(self) -> None:
        names = ["l0", "l1", "l2", "l-client"]
        found = {} if self._etcd is None else {"discovery": self._etcd.url} | self._etcd_files()
        for slot, name in enumerate(names):
            receipts = {"receipts": str(self._disk.path / "l0.jsonl")} if name == "l0" else {}
            options = {
                "slot": slot,
                "slots": len(names),
                "strategy": "local",
                "pause": self._pause,
                "averager": self._averager(**found, **receipts),
            }
            self._peer(name, "local", options, names[:3])
        self._auxiliary(found, names)

    def _etcd_files(self) -> dict[str, str]:
        return {name.replace("tls", "etcd"): path for name, path in self._files.items() if name != "token_file"}

    def _auxiliary(self, found: Mapping[str, str], names: Sequence[str]) -> None:
        tensors = self._folder / "auxiliary.safetensors"
        save_file({f"{n:05}": part.detach() for n, part in enumerate(Model(len(names)).parameters())}, tensors)
        proxies = self._proxies(2)
        grpc, direct = proxies
        options = {
            **self._averager(**found),
            "listen": f"{self._hosts.home}:{grpc.target}",
            "advertise": f"{self._hosts.home}:{grpc.port}",
            "direct_listen": f"{self._hosts.home}:{direct.target}",
            "direct_advertise": direct.port,
        }
        if not found:
            options["join"] = [self.endpoints["l0"], self.endpoints["l1"]]
        spelled = [
            text
            for name, value in options.items()
            for each in (value if isinstance(value, list) else [value])
            for text in (f"--{name.replace('_', '-')}", str(each))
        ]
        arguments = ("peer", str(tensors), "--run-id", "local", "--mode", "auxiliary", "--serve", "--json", *spelled)

        def command(_: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
            return [((sys.executable, "-m", "tests.endurance.hooked", *arguments), {})]

        self._add("auxiliary", "local", command, proxies=proxies)

    def _sites(self) -> None:
        # Of each rank the port of gRPC and that of direct connections, in front of a proxy and behind it.
        addresses = {site: [self._consecutive() for _ in range(4)] for site in ("s0", "s1")}

        def command_of(site: str, slot: int) -> Command:
            def command(life: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
                home, (advertise, direct_advertise, listen, direct_listen) = self._hosts.home, addresses[site]
                other = addresses["s1" if site == "s0" else "s0"][0]
                averager = self._averager(
                    listen=f"{home}:{listen}",
                    advertise=f"{home}:{advertise}",
                    direct_listen=f"{home}:{direct_listen}",
                    direct_advertise=direct_advertise,
                    join=[f"{home}:{other}"] if (site, life) != ("s0", 1) else [],
                )
                options = {
                    "slot": slot,
                    "slots": 2,
                    "life": life,
                    "run": "sites",
                    "strategy": "gradients",
                    "target": 2 * 2 * BATCH,
                    "pause": self._pause,
                    "averager": averager,
                }
                (port,) = ports(1)
                return [
                    (
                        python("tests.endurance.trainer", options),
                        {
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "WORLD_SIZE": "2",
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port),
                        },
                    )
                    for rank in range(2)
                ]

            return command

        for slot, (site, (advertise, direct_advertise, listen, direct_listen)) in enumerate(addresses.items()):
            proxies = [
                self._stack.enter_context(FaultProxy(host=self._hosts.home, port=front + rank, target=behind + rank))
                for front, behind in ((advertise, listen), (direct_advertise, direct_listen))
                for rank in range(2)
            ]
            self._add(site, "sites", command_of(site, slot), slot=slot, proxies=proxies)

    @staticmethod
    def _consecutive() -> int:
        """The first of two free ports that follow each other."""
        while True:
            for port in ports(16):
                if is_free(port + 1):
                    return port

    def _followers(self) -> None:
        for number in range(6):
            options = {
                "slots": 4,
                "join": [self.endpoints["g0"]],
                "run_id": "gradients",
                "listen": f"{self._hosts.home}:0",
                "stall_timeout": STALL_TIMEOUT,
                "join_timeout": 60.0,
                **self._files,
            }

            def command(
                _: int, options: Mapping[str, Any] = options
            ) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
                return [(python("tests.endurance.follower", options), {})]

            self._add(f"f{number}", "weights", command)

    def _rollouts(self) -> None:
        feed, synchronizer = self._proxies(2)
        home = self._hosts.home
        common = {
            "files": self._files,
            "feed": f"https://{home}:{feed.port}",
            "synchronizer": f"{home}:{synchronizer.port}",
        }
        flags = [text for name, path in self._files.items() for text in (f"--{name.replace('_', '-')}", path)]
        store = str(self._disk.path / "feed.sqlite")
        arguments = ("feed", "--listen", f"{home}:{feed.target}", "--store", store, "--env-timeout", "30", "--json")

        def serve_feed(_: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
            return [((sys.executable, "-m", "tests.endurance.hooked", *arguments, *flags), {})]

        self._add("feed", "rollouts", serve_feed, proxies=[feed])
        folder = self._folder / "synchronizer"
        folder.mkdir(exist_ok=True)
        served = {
            "listen": f"{home}:{synchronizer.target}",
            "advertise": f"{home}:{synchronizer.port}",
            "folder": str(folder),
        }
        self._add("synchronizer", "rollouts", self._role("synchronizer", common | served), proxies=[synchronizer])
        self._add("learner", "rollouts", self._role("learner", common | {"folder": str(self._disk.path)}))
        for number in range(2):
            self._add(f"explorer{number}", "rollouts", self._role("explorer", common, f"explorer{number}", number))

    @staticmethod
    def _role(role: str, options: Mapping[str, Any], name: str = "", slot: int = 0) -> Command:
        def command(life: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
            told = {**options, "role": role, "name": name or role, "slot": slot, "life": life}
            return [(python("tests.endurance.rollouts", told), {})]

        return command


def targets_of(system: System, omitted: Mapping[str, str]) -> list[Target]:
    """What faults can hit, without those that cannot be made here."""
    found = [Target(actor.name, actor.plane, actor.kinds) for actor in system.actors.values()]
    if any(actor.far for actor in system.actors.values()):
        found.append(Target(System.FAR, "hosts", HOST_KINDS))
    found.append(Target(System.DISK, "disk", frozenset({FaultKind.DISK})))
    if system.etcd is not None:
        found.append(Target(System.ETCD, "etcd", frozenset({FaultKind.ETCD})))
    return [Target(one.name, one.plane, one.kinds - set(omitted)) for one in found]
