"""The processes that the environments of a run need: a gateway for MCP servers, workers on other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.launch.mcp_gateways import run_gateways
from buckeye.launch.plan import Hosts, Site
from buckeye.launch.worker_hosts import worker_hosts


def run_hosts(
    environments: Sequence[EnvConfig], *, rollouts: int, sites: Mapping[int, Site], address: str | None
) -> Hosts:
    """What has to be started for a run that plays so many `rollouts` at a time, and has other nodes at
    `sites`, which reach this one at `address`. Raises UsageError for tasks that cannot be read, and for what
    cannot be placed."""
    hosts = run_gateways(environments, rollouts=rollouts)
    placed = [env for env in environments if isinstance(env, TrainEnvConfig) and any(env.placement or ())]
    if placed:
        assert address is not None, "a placed environment has other nodes, which reach this one"
        more = worker_hosts(placed, sites=sites, address=address)
        hosts = Hosts(roles=(*hosts.roles, *more.roles), env={**hosts.env, **more.env})
    return hosts
