"""Supervision of all servers: heartbeats, exclusion and recovery of servers, and updates of the weights."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from urllib.parse import urlsplit

from buckeye.base.request_gate import is_loopback
from buckeye.errors import InferenceError
from buckeye.inference.client.canary import CanaryResult
from buckeye.inference.client.replica import Replica, ReplicaLostError
from buckeye.inference.client.router import Router
from buckeye.inference.client.sleep import Sleep, put_to_sleep
from buckeye.inference.client.weight_update import Broadcast, TargetWeights, load_weights, run_canary
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.verdicts import is_power_of_ten
from buckeye.transport.weights_offer import AcceptedGroup, WeightsOffer, accept_offer, store_path

log = logging.getLogger(__name__)

_READY_POLL_SECONDS = 0.1
_WARN_AFTER_SECONDS = 60.0
_HEARTBEAT_SECONDS = 1.0
_REVIVE_SECONDS = 0.2


class Fleet:
    """Monitor of all servers of an `InferenceClient`, which documents the arguments."""

    def __init__(
        self,
        replicas: list[Replica],
        router: Router,
        *,
        recovery_timeout: float,
        heartbeat_timeout: float,
        on_restart_needed: Callable[[str, str], None],
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._recovery_timeout = recovery_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._on_restart_needed = on_restart_needed
        self._target: TargetWeights | Sleep | None = None
        self._canaries: dict[Replica, CanaryResult] = {}
        self._suspicious = 0  # comparisons of canaries with a warning
        self._refused: dict[Replica, tuple[str | None, TargetWeights | Sleep | None]] = {}
        self._wrong_results_error: InferenceError | None = None
        self._has_told_obstacle = False
        self._recovery_timer: asyncio.TimerHandle | None = None
        self._monitors: dict[Replica, asyncio.Task[None]] = {}
        self._canary_tasks: set[asyncio.Task[None]] = set()

    async def start(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until all servers are healthy, then start to monitor them.

        Raise the first error at once, such as that of a wrong model, without a wait for the other servers.
        """
        waits = [asyncio.create_task(self._wait_ready(replica, timeout)) for replica in self._replicas]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._monitors:
            self._monitors = {
                replica: asyncio.create_task(self._monitor(replica)) for replica in self._replicas
            }

    async def close(self) -> None:
        """Stop monitoring."""
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
        tasks = [*self._monitors.values(), *self._canary_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise an error if sampling cannot continue: all servers are down, or all compute incorrectly."""
        if self._wrong_results_error is not None:
            raise self._wrong_results_error
        self._router.check()
        for task in self._monitors.values():
            if task.done():
                task.result()

    def handle_lost_call(self, replica: Replica, epoch: int, error: ReplicaLostError) -> None:
        """Exclude the server of a failed call.

        `epoch` is `replica.epoch` at the start of the call. Do nothing if the epoch is different now, because
        the server was excluded during the call.
        """
        if replica.epoch == epoch and replica.is_up:
            self._take_out(replica, _reason(error))

    def metrics(self) -> dict[str, float]:
        """Return metrics of every server, and the largest difference of the newest canaries."""
        values: dict[str, float] = {"inference/up": sum(replica.is_up for replica in self._replicas)}
        for replica in self._replicas:
            key = f"inference/{replica.index}"
            values[f"{key}/requests"] = replica.requests
            values[f"{key}/tokens"] = replica.tokens
            values[f"{key}/tokens_in_flight"] = replica.tokens_in_flight
            values[f"{key}/failures"] = replica.epoch
            values[f"{key}/restarts"] = replica.restarts
            if replica.version is not None:
                values[f"{key}/weight_version"] = replica.version
        if self._canaries:
            values["canary/max_diff"] = max(result.difference for result in self._canaries.values())
        return values

    # --- weights ---

    async def update(self, target: TargetWeights) -> None:
        """Update all servers that are up to `target`.

        Raise `InferenceError` if all updates fail, or if no server comes up in time.
        """
        previous, self._target = self._target, target
        self._start_recovery_timer()
        try:
            await self._sync_all(target)
        except BaseException:
            self._target = previous
            raise
        while not any(replica.is_up for replica in self._replicas):
            self._router.check()
            await asyncio.sleep(_REVIVE_SECONDS)

    def accept_offer(self, run: Path, offer: WeightsOffer) -> Broadcast | None:
        """Accept an offer as documented in `InferenceClient`."""
        replicas = [replica for replica in self._replicas if replica.is_up]
        unable = next((replica.url for replica in replicas if not replica.receivers), None)
        if unable is not None or not replicas:
            if unable is not None and not self._has_told_obstacle:
                self._has_told_obstacle = True
                log.info("Engines get new weights by files: %s cannot receive a broadcast", unable)
            return None
        ends = list(accumulate((replica.receivers for replica in replicas), initial=1))
        hosts = [urlsplit(replica.url).hostname or "" for replica in replicas]
        loopback = offer.host == socket.gethostname() and all(map(is_loopback, hosts))
        group = AcceptedGroup(size=ends[-1], loopback=loopback)
        if not accept_offer(run, offer, group):
            return None
        ranks = dict(zip(replicas, ends, strict=False))
        return Broadcast(offer=offer, store=store_path(run, offer.store), ranks=ranks, group=group)

    async def sleep(self, target: Sleep) -> None:
        """Put all servers to sleep until the next `update`. Wait for those that are down."""
        await asyncio.gather(*self._canary_tasks)
        self._target = target
        await self._sync_all(target)
        while not all(replica.is_up for replica in self._replicas):
            self._router.check()
            await asyncio.sleep(_REVIVE_SECONDS)

    async def _sync_all(self, target: TargetWeights | Sleep) -> None:
        """Bring all servers that are up to `target`, and exclude those that fail.

        Raise `InferenceError` if all servers reject weights.
        """
        replicas = [replica for replica in self._replicas if replica.is_up]
        epochs = [replica.epoch for replica in replicas]
        calls = [self._sync(replica, target) for replica in replicas]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        failed = [e for e in errors if e is not None and not isinstance(e, ReplicaLostError)]
        have_all_failed = len(failed) == len(self._replicas) and isinstance(target, TargetWeights)
        if failed and (have_all_failed or not isinstance(failed[0], InferenceError)):
            raise failed[0]
        for replica, epoch, error in zip(replicas, epochs, errors, strict=True):
            if isinstance(error, ReplicaLostError):
                self.handle_lost_call(replica, epoch, error)
            elif error is not None:
                self._fail(replica, _reason(error))

    async def _sync(self, replica: Replica, target: TargetWeights | Sleep) -> None:
        """Put a server to sleep, or load the weights into a server and check its canary.

        An idle server is checked before this method returns. A busy server is checked in the background,
        because the request of the canary waits in the server's queue.
        """

        async def load(weights: TargetWeights) -> bool:
            await load_weights(replica, weights)
            is_idle = replica.tokens_in_flight == 0 or not replica.is_up
            if is_idle:  # a server that restarts meanwhile must load the weights again
                await self._check_canary(replica, weights)
            return is_idle

        async with replica.update_lock:
            if isinstance(target, Sleep):
                await replica.retry_drops(lambda: put_to_sleep(replica, target))
                return
            if await replica.retry_drops(lambda: load(target)):
                return
        task = asyncio.create_task(self._check_canary_later(replica, target, replica.epoch))
        self._canary_tasks.add(task)
        task.add_done_callback(self._canary_tasks.discard)

    async def _check_canary(self, replica: Replica, target: TargetWeights) -> None:
        """Raise `InferenceError` if the log-probs of a server differ from the trainer's for the canary."""
        if target.canary is None:
            return
        canary, previous = target.canary, self._canaries.get(replica)
        result = await run_canary(replica, target, canary, previous)
        if result is None:
            return
        self._canaries[replica] = result
        if result.warning is not None:
            self._suspicious += 1
            if is_power_of_ten(self._suspicious):
                log.warning(
                    "%s may compute incorrectly with weights version %d: %s (%d such comparisons so far)",
                    replica.url,
                    target.version,
                    result.warning,
                    self._suspicious,
                )
        if result.problem is not None:
            error = InferenceError(
                f"the server computes incorrectly with weights version {target.version}: {result.problem}",
                code="BK-WEIGHTS-UPDATE",
                at=replica.url,
            )
            if self._all_are_wrong(target):
                self._wrong_results_error = error
            raise error

    async def _check_canary_later(self, replica: Replica, target: TargetWeights, epoch: int) -> None:
        try:
            await replica.retry_drops(lambda: self._check_canary(replica, target))
        except ReplicaLostError as error:
            self.handle_lost_call(replica, epoch, error)
        except InferenceError as error:
            if replica.epoch == epoch and replica.is_up:
                self._fail(replica, _reason(error))

    def _all_are_wrong(self, target: TargetWeights) -> bool:
        results = [self._canaries.get(replica) for replica in self._replicas]
        return all(r is not None and r.checksum == target.checksum and r.problem for r in results)

    # --- health ---

    async def _wait_ready(self, replica: Replica, timeout: float) -> None:
        deadline, warn_at = time.monotonic() + timeout, time.monotonic() + _WARN_AFTER_SECONDS
        while not await replica.is_healthy(max(0.1, min(warn_at, deadline) - time.monotonic())):
            if time.monotonic() >= warn_at:
                log.warning("%s does not reply yet; waiting up to %g s", replica.url, timeout)
                warn_at = deadline
            if time.monotonic() >= deadline:
                raise InferenceError(
                    f"no reply to GET /health within {timeout:g} s",
                    code="BK-INFERENCE-UNREACHABLE",
                    at=replica.url,
                    hint="start the inference server, or check orchestrator.client.base_url",
                )
            await asyncio.sleep(_READY_POLL_SECONDS)
        await replica.retry_drops(replica.check_model)
        replica.process_id = await self._identify(replica)

    async def _identify(self, replica: Replica) -> str:
        return await replica.retry_drops(lambda: replica.identify(timeout=self._heartbeat_timeout))

    async def _monitor(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS if replica.is_up else _REVIVE_SECONDS)
            if replica.is_up:
                await self._check_heartbeat(replica)
            else:
                await self._revive(replica)

    async def _check_heartbeat(self, replica: Replica) -> None:
        """Exclude a server if it does not reply, or if its process has changed.

        A reply to any other request also counts. A server that loads weights is not checked, because it may
        not reply.
        """
        epoch, started = replica.epoch, time.monotonic()
        if replica.update_lock.locked():
            return
        try:
            await replica.retry_drops(
                lambda: replica.request("GET", "/health", timeout=self._heartbeat_timeout)
            )
        except ReplicaLostError as error:
            self.handle_lost_call(replica, epoch, error)
            return
        except InferenceError as error:
            if (
                replica.last_reply_at < started
                and replica.epoch == epoch
                and not replica.update_lock.locked()
            ):
                self._take_out(replica, _reason(error))
                self._on_restart_needed(replica.url, _reason(error))
            return
        try:
            process = await self._identify(replica)
        except ReplicaLostError as error:
            self.handle_lost_call(replica, epoch, error)
        except InferenceError:
            log.debug("%s is alive, but its engine is busy", replica.url)
        else:
            if process != replica.process_id and replica.epoch == epoch:
                self._take_out(replica, "it was restarted")

    def _take_out(self, replica: Replica, reason: str) -> None:
        log.warning("%s is not used until it recovers: %s", replica.url, reason)
        replica.exclude(reason)
        self._start_recovery_timer()

    def _start_recovery_timer(self) -> None:
        """Start the timer if all servers are down and should sample."""
        is_needed = not isinstance(self._target, Sleep) and not any(r.is_up for r in self._replicas)
        if self._recovery_timer is None and is_needed:
            loop = asyncio.get_running_loop()
            self._recovery_timer = loop.call_later(self._recovery_timeout, self._give_up)

    def _fail(self, replica: Replica, reason: str) -> None:
        """Exclude a running server that failed, and request its restart.

        The server is not used with the current weights until its process has changed.
        """
        self._refused[replica] = (replica.process_id, self._target)
        self._take_out(replica, reason)
        self._on_restart_needed(replica.url, reason)

    def _give_up(self) -> None:
        self._router.fail_all(
            InferenceError(
                f"all inference servers are down, and none recovered within {self._recovery_timeout:g} s "
                f"({self._router.describe()})",
                code="BK-INFERENCE-UNREACHABLE",
                hint="see the logs of the inference servers",
            )
        )

    async def _revive(self, replica: Replica) -> None:
        """Use an excluded server again, if it responds, serves the model, and loads the newest weights."""
        process = None
        try:
            if not await replica.is_healthy():
                return
            await replica.check_model()
            process = await self._identify(replica)
            if self._refused.get(replica) == (process, self._target):
                return  # the server has failed with this process and these weights
            await self._sync_newest(replica)
        except ReplicaLostError as error:
            log.debug("%s has not recovered yet: %s", replica.url, error)
        except InferenceError as error:
            self._keep_out(replica, process, _reason(error))
        else:
            self._put_back(replica, process)

    async def _sync_newest(self, replica: Replica) -> None:
        target = None
        while self._target is not target:  # an update may set another target meanwhile
            target = self._target
            if target is not None:
                await self._sync(replica, target)

    def _keep_out(self, replica: Replica, process: str | None, reason: str) -> None:
        if replica.down_reason != reason:
            log.warning("%s is running again but cannot be used: %s", replica.url, reason)
        replica.down_reason = reason
        self._refused[replica] = (process, self._target)
        if process is not None:
            self._on_restart_needed(replica.url, reason)

    def _put_back(self, replica: Replica, process: str | None) -> None:
        replica.restarts += replica.process_id not in (None, process)
        replica.process_id, replica.down_reason = process, None
        if not isinstance(self._target, TargetWeights):
            replica.version = None
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
            self._recovery_timer = None
        weights = "its first weights" if replica.version is None else f"weights version {replica.version}"
        log.log(SUCCESS, "%s is used again, with %s", replica.url, weights)
        self._router.resume()


def _reason(error: BaseException) -> str:
    """Return an error with its hint as text. Omit the server's URL, which the log lines begin with."""
    if isinstance(error, InferenceError):
        return f"{error.message}. {error.hint}" if error.hint else error.message
    return str(error)
