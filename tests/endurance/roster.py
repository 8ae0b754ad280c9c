"""Which processes a run has: three runs of peers, followers of weights, and reinforcement learning.

| part | processes |
|---|---|
| `gradients` | 3 peers and a client that train with `GradientAveraging` |
| `local` | 3 peers, a client and an auxiliary that train with `LocalSGD` |
| `sites` | 2 sites with FSDP2 of 2 ranks each, with `GradientAveraging` |
| `weights` | 6 followers of the weights that a peer of `gradients` publishes, in a tree |
| `rollouts` | a synchronizer, a learner, 2 explorers that are environments of a feed, and the feed |
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from examples.ports import is_free
from tests.endurance.actors import Actor
from tests.endurance.plan import GROUP_WAIT, STALL_TIMEOUT
from tests.endurance.trainer import BATCH, Model
from tests.support.fault_proxy import FaultProxy
from tests.support.ports import free_port

PARTS = ("gradients", "local", "sites", "weights", "rollouts")

HOST = "127.0.0.1"

Words = Sequence[tuple[Sequence[str], Mapping[str, str]]]
"""The arguments and the environment of each process of an actor."""


class Roster:
    """Makes the actors of some parts; `files` are certificates and token, by the name of the option."""

    def __init__(self, stack: ExitStack, folder: Path, files: Mapping[str, Path], only: Collection[str]) -> None:
        self._stack, self._folder = stack, folder
        self._files = {name: str(path) for name, path in files.items()}
        self.actors: list[Actor] = []
        self._endpoints: dict[str, str] = {}
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

    def _proxy(self) -> FaultProxy:
        return self._stack.enter_context(FaultProxy())

    def _averager(self, **options: Any) -> dict[str, Any]:
        return {
            "group_wait": GROUP_WAIT,
            "round_timeout": 30.0,
            "stall_timeout": STALL_TIMEOUT,
            "join_timeout": 30.0,
            **self._files,
            **options,
        }

    def _behind_proxies(self) -> tuple[list[FaultProxy], dict[str, Any]]:
        """Proxies in front of a peer's port of gRPC and that of direct connections, and its options."""
        grpc, direct = proxies = [self._proxy(), self._proxy()]
        return proxies, {
            "listen": f"{HOST}:{grpc.target}",
            "advertise": f"{HOST}:{grpc.port}",
            "direct_listen": f"{HOST}:{direct.target}",
            "direct_advertise": direct.port,
        }

    def _peers(self, run: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
        """Peers that train in one process each; the last one is a client."""
        for slot, name in enumerate(names):
            proxies: list[FaultProxy] = []
            where: dict[str, Any] = {"mode": "client"}
            if name != names[-1]:
                proxies, where = self._behind_proxies()
                self._endpoints[name] = where["advertise"]
            told = {**options, "run": run, "slot": slot, "slots": len(names)}
            if name == "g0":
                told["publishes"] = True
            # The first peer begins the run; when it comes back it joins the others.
            others = [other for other in names[:-1] if other != name]
            command = partial(self._peer, told, where, others, begins=name == names[0])
            self.actors.append(Actor(name, run, command, proxies, slot))

    def _peer(
        self, told: Mapping[str, Any], where: Mapping[str, Any], others: Sequence[str], life: int, *, begins: bool
    ) -> Words:
        join = [] if begins and life == 1 else [self._endpoints[other] for other in others]
        return [(python("trainer", {**told, "life": life, "averager": self._averager(**where, join=join)}), {})]

    def _gradients(self) -> None:
        names = ["g0", "g1", "g2", "g-client"]
        self._peers("gradients", names, {"strategy": "gradients", "target": 2 * BATCH * len(names)})

    def _local(self) -> None:
        names = ["l0", "l1", "l2", "l-client"]
        self._peers("local", names, {"strategy": "local"})
        tensors = self._folder / "auxiliary.safetensors"
        save_file({f"{n:05}": part.detach() for n, part in enumerate(Model(len(names)).parameters())}, tensors)
        proxies, where = self._behind_proxies()
        options = self._averager(**where, join=[self._endpoints["l0"], self._endpoints["l1"]])
        arguments = ("peer", str(tensors), "--run-id", "local", "--mode", "auxiliary", "--serve", "--json")
        self._command("auxiliary", "local", (*arguments, *flags(options)), proxies)

    def _command(self, name: str, plane: str, arguments: Sequence[str], proxies: Sequence[FaultProxy]) -> None:
        """A command of averaging."""
        words = (sys.executable, "-m", "tests.endurance.hooked", *arguments)
        self.actors.append(Actor(name, plane, lambda _: [(words, {})], proxies))

    def _sites(self) -> None:
        # Of each rank the port of gRPC and that of direct connections, in front of a proxy and behind it.
        addresses = {site: [consecutive() for _ in range(4)] for site in ("s0", "s1")}
        for slot, (site, (advertise, direct_advertise, listen, direct_listen)) in enumerate(addresses.items()):
            proxies = [
                self._stack.enter_context(FaultProxy(port=front + rank, target=behind + rank))
                for front, behind in ((advertise, listen), (direct_advertise, direct_listen))
                for rank in range(2)
            ]
            where: dict[str, Any] = {
                "listen": f"{HOST}:{listen}",
                "advertise": f"{HOST}:{advertise}",
                "direct_listen": f"{HOST}:{direct_listen}",
                "direct_advertise": direct_advertise,
            }
            self._endpoints[site] = where["advertise"]
            other = "s1" if site == "s0" else "s0"
            told = {"slot": slot, "slots": 2, "run": "sites", "strategy": "gradients", "target": 2 * 2 * BATCH}
            command = partial(self._site, told, where, [other], begins=site == "s0")
            self.actors.append(Actor(site, "sites", command, proxies, slot))

    def _site(
        self, told: Mapping[str, Any], where: Mapping[str, Any], others: Sequence[str], life: int, *, begins: bool
    ) -> Words:
        [(words, _)] = self._peer(told, where, others, life, begins=begins)
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
        return [(words, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]

    def _followers(self) -> None:
        options = {"role": "follower", "slots": 4, "join": self._endpoints["g0"], "files": self._files}
        for number in range(6):
            self._worker(f"f{number}", "weights", options)

    def _rollouts(self) -> None:
        feed, synchronizer = self._proxy(), self._proxy()
        common = {
            "files": self._files,
            "feed": f"https://{HOST}:{feed.port}",
            "synchronizer": f"{HOST}:{synchronizer.port}",
            "folder": str(self._folder),
        }
        served = {"listen": f"{HOST}:{synchronizer.target}", "advertise": common["synchronizer"]}
        store = str(self._folder / "feed.sqlite")
        arguments = ("feed", "--listen", f"{HOST}:{feed.target}", "--store", store, "--env-timeout", "30", "--json")
        self._command("feed", "rollouts", (*arguments, *flags(self._files)), [feed])
        self._worker("synchronizer", "rollouts", {"role": "synchronizer", **common, **served}, [synchronizer])
        self._worker("learner", "rollouts", {"role": "learner", **common})
        for number in range(2):
            self._worker(f"explorer{number}", "rollouts", {"role": "explorer", **common, "slot": number})

    def _worker(self, name: str, plane: str, options: Mapping[str, Any], proxies: Sequence[FaultProxy] = ()) -> None:
        def command(life: int) -> Words:
            return [(python("workers", {**options, "name": name, "life": life}), {})]

        self.actors.append(Actor(name, plane, command, proxies))


def python(module: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tests.endurance.{module}", json.dumps(options))


def flags(options: Mapping[str, Any]) -> list[str]:
    return [
        text
        for name, value in options.items()
        for each in (value if isinstance(value, list) else [value])
        for text in (f"--{name.replace('_', '-')}", str(each))
    ]


def consecutive() -> int:
    """The first of two free ports that follow each other."""
    return next(port for port in iter(free_port, None) if is_free(port + 1))
