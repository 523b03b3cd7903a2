"""`python -m paceline.launch.clusters.ray_driver`: agents as actors of a placement group."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError
from paceline.launch.clusters import visit
from paceline.launch.clusters.driver import CHECKS, Cluster, Table, is_asked, say, serve
from paceline.launch.clusters.visit import ask, work

PLACE_SECONDS = 60.0
"""How long the cluster has to give what it has said it has."""


class Keeper:
    """The actor that holds a host's CPUs while its agent runs."""

    def keep(self, words: list[str], variables: dict[str, str]) -> str:
        return work(words, variables)


class RayCluster(Cluster):
    """A running Ray cluster, as a driver sees it."""

    def __init__(self, address: str) -> None:
        import ray

        self.ray = ray
        self.address = address
        self._nodes: dict[str, Table] = {}
        """By address: its node's number, and what of it we ask for."""

    def _connect(self) -> None:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(visit)
        try:
            self.ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"no Ray cluster answers at --address {self.address}: {reason}; start one with"
                " `ray start --head`, and this command on one of its nodes"
            ) from None

    def hosts(self, survey: Table) -> list[Table]:
        if not self.ray.is_initialized():
            self._connect()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        question: Any = self.ray.remote(num_cpus=0, max_retries=0)(ask)
        free = self._free()
        asked: dict[Any, Table] = {}
        for node in self.ray.nodes():
            resources = free.get(node["NodeID"], node["Resources"])
            cpus = int(resources.get("CPU", 0))
            if not node["Alive"] or cpus < 1 or not is_asked(survey, node["NodeManagerAddress"]):
                continue
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            words = [CHECKS, survey["wanted"]]
            answer = question.options(scheduling_strategy=place).remote(
                words, survey["variables"], survey["seconds"]
            )
            wanted = {"CPU": cpus, **{k: v for k, v in resources.items() if k == "GPU" and v}}
            asked[answer] = {"node": node, "wanted": wanted}
        if not asked:
            raise UserError(
                f"the Ray cluster at --address {self.address} has no node with a free CPU: wait"
                " until others have ended, or add nodes with `ray start`"
            )
        return [self._host(answer, **about) for answer, about in self._ordered(asked, survey)]

    def _ordered(self, asked: dict[Any, Table], survey: Table) -> list[tuple[Any, Table]]:
        self.ray.wait(list(asked), num_returns=len(asked), timeout=survey["seconds"] + 10)
        return sorted(asked.items(), key=lambda each: str(each[1]["node"]["NodeManagerAddress"]))

    def _free(self) -> dict[str, Table]:
        """What of every node others do not hold, by its number."""
        with contextlib.suppress(AttributeError, ImportError):
            from ray._private.state import available_resources_per_node

            return dict(available_resources_per_node())
        return {}

    def _host(self, answer: Any, *, node: Table, wanted: Table) -> Table:
        address = str(node["NodeManagerAddress"])
        self._nodes[address] = {"id": node["NodeID"], "wanted": wanted, "all": node["Resources"]}
        try:
            facts = self.ray.get(answer, timeout=0.1)
        except self.ray.exceptions.RayError as error:
            facts = {"failure": " ".join(str(error).split())[:300]}
        name = facts.get("host") or str(node["NodeManagerHostname"])
        return {"name": name, "address": address, "cpus": wanted["CPU"], "facts": facts}

    def run(self, agents: Sequence[Table], words: list[str], variables: dict[str, str]) -> None:
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if absent := [agent["address"] for agent in agents if agent["address"] not in self._nodes]:
            raise SystemExit(f"no node of the Ray cluster with a free CPU is at {absent[0]}")
        nodes = [self._nodes[agent["address"]] for agent in agents]
        group = placement_group([_bundle(node) for node in nodes], strategy="STRICT_SPREAD")
        if not group.wait(PLACE_SECONDS):
            asked = ", ".join(f"{node['wanted']['CPU']} CPUs" for node in nodes)
            raise SystemExit(
                f"Ray has not given {asked} on {len(nodes)} nodes within {PLACE_SECONDS:.0f} s:"
                " others hold them, or a node is gone (`ray status` shows both)"
            )
        given = placement_group_table(group)["bundles_to_node_id"]
        waiting: dict[Any, str] = {}
        keepers = []
        for agent, node in zip(agents, nodes, strict=True):
            bundle = next(number for number, at in given.items() if at == node["id"])
            keeper = self.ray.remote(Keeper).options(
                num_cpus=node["wanted"]["CPU"],
                num_gpus=node["wanted"].get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=int(bundle)
                ),
            )
            keepers.append(keeper.remote())
            own = [*words, "--node", str(agent["node"])]
            waiting[keepers[-1].keep.remote(own, variables)] = agent["address"]
        self._wait(waiting)

    def _wait(self, waiting: dict[Any, str]) -> None:
        """Until every agent has ended; one that is lost ends none of the others."""
        while waiting:
            (ended, *_), _ = self.ray.wait(list(waiting), num_returns=1)
            address = waiting.pop(ended)
            try:
                failure = self.ray.get(ended)
            except self.ray.exceptions.RayError as error:
                failure = " ".join(str(error).split())[:600]
            if failure:
                say(f"{address}: {failure}")

    def close(self) -> None:
        self.ray.shutdown()


def _bundle(node: Table) -> dict[str, float]:
    """CPUs of this very node: Ray has a resource for each by its address."""
    own = [key for key in node["all"] if key.startswith("node:") and "__" not in key]
    return {**node["wanted"], **dict.fromkeys(own, 0.001)}


def main() -> int:
    """Serve the launcher."""
    parser = argparse.ArgumentParser(prog="paceline.launch.clusters.ray_driver")
    parser.add_argument("--address", required=True)
    return serve(RayCluster(parser.parse_args().address))


if __name__ == "__main__":
    sys.exit(main())
