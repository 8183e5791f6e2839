"""Supervision of the servers: heartbeats, exclusion, recovery, and one version of the weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from buckeye.errors import InferenceError
from buckeye.inference.client.canary import CanaryResult
from buckeye.inference.client.replica import ConnectionDroppedError, Replica, ReplicaLostError, gather_results
from buckeye.inference.client.router import Router
from buckeye.inference.client.weight_update import TargetWeights, load_weights, run_canary
from buckeye.monitor.log import SUCCESS

log = logging.getLogger(__name__)

_READY_POLL_SECONDS = 0.1
_TELL_SECONDS = 60.0
_BEAT_SECONDS = 1.0
_REVIVE_SECONDS = 0.2


class Fleet:
    """All servers of a client. `InferenceClient` describes the arguments."""

    def __init__(
        self,
        replicas: list[Replica],
        router: Router,
        *,
        recovery_timeout: float,
        heartbeat_timeout: float,
        on_restart_needed: Callable[[str, str], None] | None,
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._recovery_timeout = recovery_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._on_broken = on_restart_needed
        self._target: TargetWeights | None = None
        self._heard: dict[Replica, CanaryResult] = {}
        self._refused: dict[Replica, tuple[str | None, TargetWeights | None]] = {}
        self._disagreement: InferenceError | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._listening: set[asyncio.Task[None]] = set()

    async def start(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for all servers, then monitor them."""
        await gather_results([self._wait_ready(replica, timeout) for replica in self._replicas])
        if not self._watching:
            self._watching = {
                replica: asyncio.create_task(self._watch(replica)) for replica in self._replicas
            }

    async def close(self) -> None:
        """Stop monitoring."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        tasks = [*self._watching.values(), *self._listening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise an error that cannot be recovered from."""
        if self._disagreement is not None:
            raise self._disagreement
        self._router.check()
        for task in self._watching.values():
            if task.done():
                task.result()

    async def handle_lost_call(self, replica: Replica, epoch: int, error: ReplicaLostError) -> None:
        """Handle a failed call that began in the server's `epoch`. Take the server out, unless that was done
        already or only the connection was lost.
        """
        if isinstance(error, ConnectionDroppedError) and await replica.is_alive(self._heartbeat_timeout):
            return
        self._take_out_once(replica, epoch, str(error))

    def metrics(self) -> dict[str, float]:
        """Return metrics of every server, and of the newest canaries."""
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
        if self._heard:
            values["canary/max_diff"] = max(heard.difference for heard in self._heard.values())
        return values

    # --- weights ---

    async def update(self, target: TargetWeights) -> None:
        """Update all servers to `target`. Raise `InferenceError` if all fail, or none is up in time."""
        before, self._target = self._target, target
        replicas = [replica for replica in self._replicas if replica.is_up]
        epochs = [replica.epoch for replica in replicas]
        calls = [self._sync(replica, target) for replica in replicas]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        failed = [e for e in errors if e is not None and not isinstance(e, ReplicaLostError)]
        unwatched = [e for e in errors if e is not None and not self._watching]
        if failed and (len(failed) == len(self._replicas) or not isinstance(failed[0], InferenceError)):
            self._target = before
            raise failed[0]
        if unwatched:
            raise unwatched[0]
        for replica, epoch, error in zip(replicas, epochs, errors, strict=True):
            if isinstance(error, ReplicaLostError):
                self._take_out_once(replica, epoch, str(error))
            elif error is not None:
                self._fail(replica, str(error))
        self._router.release(await self._router.acquire(0), 0)  # until one server is up

    async def _sync(self, replica: Replica, target: TargetWeights) -> None:
        """Load the weights. An idle server answers its canary at once; a busy one later, so that the update
        does not wait for its queue.
        """
        async with replica.update_lock:
            await load_weights(replica, target)
            if replica.tokens_in_flight == 0 or not replica.is_up:
                await self._hear(replica, target)
                return
        listening = asyncio.create_task(self._hear_later(replica, target, replica.epoch))
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)

    async def _hear(self, replica: Replica, target: TargetWeights) -> None:
        """Raise `InferenceError` if a server's canary differs from the trainer's."""
        if target.canary is None:
            return
        heard = await run_canary(replica, target, target.canary, self._heard.get(replica))
        if heard is None:
            return
        self._heard[replica] = heard
        if heard.problem is not None:
            error = InferenceError(
                f"{replica.url} does not compute with weights version {target.version} what the trainer "
                f"does: {heard.problem}."
            )
            if self._all_disagree(target):
                self._disagreement = error
            raise error

    async def _hear_later(self, replica: Replica, target: TargetWeights, epoch: int) -> None:
        try:
            await self._hear(replica, target)
        except ReplicaLostError as error:
            await self.handle_lost_call(replica, epoch, error)
        except InferenceError as error:
            if replica.epoch == epoch and replica.is_up:
                self._fail(replica, str(error))

    def _all_disagree(self, target: TargetWeights) -> bool:
        heard = [self._heard.get(replica) for replica in self._replicas]
        return all(h is not None and h.checksum == target.checksum and h.problem for h in heard)

    # --- health ---

    async def _wait_ready(self, replica: Replica, timeout: float) -> None:
        deadline, warn_at = time.monotonic() + timeout, time.monotonic() + _TELL_SECONDS
        while not await replica.is_healthy(max(0.1, min(warn_at, deadline) - time.monotonic())):
            if time.monotonic() >= warn_at:
                log.warning("%s does not answer yet: it is waited for, at most %g s", replica.url, timeout)
                warn_at = deadline
            if time.monotonic() >= deadline:
                raise InferenceError(
                    f"{replica.url} did not answer GET /health within {timeout:g} s: "
                    "is the inference server running?"
                )
            await asyncio.sleep(_READY_POLL_SECONDS)
        await replica.check_model()
        replica.process_id = await replica.identify(timeout=self._heartbeat_timeout)
        replica.is_monitored = True

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS if replica.is_up else _REVIVE_SECONDS)
            if replica.is_up:
                await self._beat(replica)
            else:
                await self._revive(replica)

    async def _beat(self, replica: Replica) -> None:
        """Check that a server is alive, and which process it is.

        A busy server is not dead: any reply counts, and none is expected while weights are loaded.
        """
        epoch, asked = replica.epoch, time.monotonic()
        if replica.update_lock.locked():
            return
        try:
            await replica.request("GET", "/health", timeout=self._heartbeat_timeout)
        except ReplicaLostError as error:
            await self.handle_lost_call(replica, epoch, error)
            return
        except InferenceError as error:
            if replica.last_reply_at < asked and replica.epoch == epoch and not replica.update_lock.locked():
                self._take_out(replica, str(error))
                self._report_broken(replica, str(error))
            return
        try:
            process = await replica.identify(timeout=self._heartbeat_timeout)
        except ReplicaLostError as error:
            await self.handle_lost_call(replica, epoch, error)
        except InferenceError:
            log.debug("%s lives, and its engine has no time to say more", replica.url)
        else:
            if process != replica.process_id and replica.epoch == epoch:
                self._take_out(replica, "it was started anew")

    def _take_out_once(self, replica: Replica, epoch: int, reason: str) -> None:
        if replica.epoch == epoch and replica.is_up:
            self._take_out(replica, reason)

    def _take_out(self, replica: Replica, reason: str) -> None:
        log.warning("%s is not used until it is back: %s", replica.url, reason)
        replica.exclude(reason)
        self._expect_one_back()

    def _expect_one_back(self) -> None:
        """If no server is up, start the recovery timeout."""
        if self._giving_up is None and not any(other.is_up for other in self._replicas):
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._recovery_timeout, self._give_up)

    def _fail(self, replica: Replica, reason: str) -> None:
        """Take out a running server that failed. This process is not tried again with these weights."""
        self._refused[replica] = (replica.process_id, self._target)
        self._take_out(replica, reason)
        self._report_broken(replica, reason)

    def _report_broken(self, replica: Replica, reason: str) -> None:
        if self._on_broken is not None:
            self._on_broken(replica.url, reason)

    def _give_up(self) -> None:
        self._router.fail_all(
            InferenceError(
                f"All inference servers are out, and none came back within {self._recovery_timeout:g} s "
                f"({self._router.describe()})."
            )
        )

    async def _revive(self, replica: Replica) -> None:
        """Use a server again if it responds, serves the model, and has the newest weights."""
        process = None
        try:
            if not await replica.is_healthy():
                return
            await replica.check_model()
            process = await replica.identify(timeout=self._heartbeat_timeout)
            if self._refused.get(replica) == (process, self._target):
                return  # nothing has changed since it failed
            await self._catch_up(replica)
        except ReplicaLostError as error:
            log.debug("%s is not back yet: %s", replica.url, error)
        except InferenceError as error:
            self._still_out(replica, process, str(error))
        else:
            self._put_back(replica, process)

    async def _catch_up(self, replica: Replica) -> None:
        target = None
        while self._target is not target:  # it may change meanwhile
            target = self._target
            if target is not None:
                await self._sync(replica, target)

    def _still_out(self, replica: Replica, process: str | None, reason: str) -> None:
        if replica.down_reason != reason:
            log.warning("%s is back and cannot be used: %s", replica.url, reason)
        replica.down_reason = reason
        self._refused[replica] = (process, self._target)
        if process is not None:
            self._report_broken(replica, reason)

    def _put_back(self, replica: Replica, process: str | None) -> None:
        replica.restarts += replica.process_id not in (None, process)
        replica.process_id, replica.down_reason = process, None
        if self._target is None:
            replica.version = None
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        log.log(SUCCESS, "%s is back, with weights version %s", replica.url, _named(replica.version))
        self._router.resume()


def _named(version: int | None) -> str:
    return "of its start" if version is None else str(version)
