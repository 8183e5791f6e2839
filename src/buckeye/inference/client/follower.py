"""Client of a process that only samples. The client of another process supervises the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from buckeye.inference.client.client import InferenceClient
from buckeye.inference.client.replica import Replica, ReplicaLostError


class ServerState(msgspec.Struct, array_like=True, frozen=True):
    """State of a server, as the supervising client sees it."""

    version: int | None
    adapter: str | None
    down_reason: str | None
    epoch: int
    max_num_seqs: int | None
    is_vllm: bool


class ServerUse(msgspec.Struct, array_like=True, frozen=True):
    """Counts of the requests of one client to one server. The first three only grow."""

    requests: int = 0
    tokens: int = 0
    drops: int = 0
    requests_in_flight: int = 0
    tokens_in_flight: int = 0


class ClientUse(msgspec.Struct, array_like=True, frozen=True):
    """Counts of one client: per server, and of its requests that wait or were repeated."""

    servers: tuple[ServerUse, ...] = ()
    requeued: int = 0
    waiting: int = 0
    queued: int = 0


def server_states(replicas: Sequence[Replica]) -> list[ServerState]:
    """Return the states to send to the following clients."""
    return [
        ServerState(r.version, r.adapter, r.down_reason, r.epoch, r.max_num_seqs, r.is_vllm) for r in replicas
    ]


def add_use(client: InferenceClient, before: ClientUse, after: ClientUse) -> None:
    """Add the change of the counts of a following client to those of `client`."""
    pad = [ServerUse()] * len(client.replicas)
    for replica, old, new in zip(client.replicas, before.servers or pad, after.servers or pad, strict=True):
        replica.requests += new.requests - old.requests
        replica.tokens += new.tokens - old.tokens
        replica.drops += new.drops - old.drops
        replica.tokens_in_flight += new.tokens_in_flight - old.tokens_in_flight
        if bool(old.requests_in_flight) < bool(new.requests_in_flight):
            replica.busy_clock.__enter__()
        elif bool(old.requests_in_flight) > bool(new.requests_in_flight):
            replica.busy_clock.__exit__()
    client.requeued += after.requeued - before.requeued
    client.waiting_elsewhere += after.waiting - before.waiting
    client.queued_elsewhere += after.queued - before.queued


class FollowingClient(InferenceClient):
    """Client that takes the states of the servers from another client, and reports lost servers to it.

    `on_lost` gets the index of the server, its epoch in the other client, and the reason.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        api_key: str | None,
        timeout: float,
        model: str,
        on_lost: Callable[[int, int, str], None],
    ) -> None:
        super().__init__(base_urls, api_key=api_key, timeout=timeout, model=model)
        self._on_lost = on_lost
        self._epochs = [0] * len(base_urls)
        self._reported = [-1] * len(base_urls)

    def follow(self, states: Sequence[ServerState], share: tuple[int, int]) -> None:
        """Take over the states of the servers, and this client's `share` of the requests to each."""
        for replica, state in zip(self._replicas, states, strict=True):
            index = replica.index
            if state.epoch != self._epochs[index] or (state.down_reason is not None and replica.is_up):
                replica.exclude(state.down_reason or "it was restarted")  # fails the calls before it
            self._epochs[index] = state.epoch
            if state.epoch > self._reported[index]:  # else, the other client does not know of the loss yet
                replica.down_reason = state.down_reason
            replica.version, replica.adapter = state.version, state.adapter
            replica.max_num_seqs, replica.is_vllm = state.max_num_seqs, state.is_vllm
            replica.share = share
        self._router.resume()

    def handle_lost_call(self, replica: Replica, epoch: int, error: ReplicaLostError) -> None:
        """Exclude the server of a failed call until the other client reports its recovery."""
        if replica.epoch == epoch and replica.is_up:
            replica.exclude(error.message)
            self._reported[replica.index] = self._epochs[replica.index]
            self._on_lost(replica.index, self._epochs[replica.index], error.message)

    def use(self) -> ClientUse:
        """Return the counts of this client."""
        servers = tuple(
            ServerUse(r.requests, r.tokens, r.drops, r.requests_in_flight, r.tokens_in_flight)
            for r in self._replicas
        )
        waiting, queued = self._router.num_waiting_rollouts, self._router.num_queued_requests
        return ClientUse(servers, self.requeued, waiting, queued)
