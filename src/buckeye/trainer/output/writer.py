"""What a trainer leaves on disk, written while it goes on: versions of the weights, and checkpoints."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from buckeye.base import heartbeat
from buckeye.base.disk import Writing, human_bytes, size_of, write_when_room
from buckeye.base.faults import fault_point
from buckeye.base.process import RunIdentity
from buckeye.base.storage import write_file
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import BuckeyeError, CheckpointError, StoreError, UsageError
from buckeye.monitor.metrics import MetricsLog
from buckeye.trainer.learner import Learner
from buckeye.trainer.model.adapter_files import has_adapter, save_weights
from buckeye.trainer.output.served_weights import ServedWeights, greedy_canary, stored_as
from buckeye.trainer.output.state import Captured, capture_state, write_state
from buckeye.trainer.parallel.ranks import local_rank, ranks_apart, write_together
from buckeye.trainer.parallel.shards import write_pieces
from buckeye.transport.checkpoint import (
    best_by_reward,
    list_checkpoints,
    open_store,
    prune_checkpoints,
    read_scores,
    save_checkpoint,
)
from buckeye.transport.checkpoint.shards import (
    SHARDS_DIRECTORY,
    await_parts,
    has_shards,
    link_or_copy,
    part_path,
)
from buckeye.transport.weights import prune_weights, publish_weights

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_STORE_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """`interval` is the number of steps between checkpoints (None: only when asked), `keep` how many remain
    (None: all). `timeout_seconds` is how long ranks wait for each other's shards, `store_seconds` how long
    for those that go to the `store`, because not all ranks have the first one's directory."""

    interval: int | None
    keep: int | None
    timeout_seconds: float
    store: str | None
    store_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What published weights are stored as, None: what the policy computes in, and whether they are rounded
    to it `stochastic`, from a `seed`."""

    dtype: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0


class Output:
    """Writes `weights/` and `checkpoints/` of a run; all ranks must call its methods.

    A checkpoint is copied at once and written while training goes on, one at a time. Leaving this as a
    context waits for it.
    """

    def __init__(
        self,
        output_dir: Path,
        learner: Learner,
        identity: RunIdentity,
        metrics: MetricsLog,
        policy: CheckpointPolicy,
        stored: Stored,
    ) -> None:
        self._run = output_dir
        self._weights = output_dir / "weights"
        self._checkpoints = output_dir / "checkpoints"
        self._learner = learner
        self._identity = identity
        self._metrics = metrics
        self._policy = policy
        self._stored = stored
        self._saved = learner.progress.step
        self._writing = Background()
        ranks = learner.ranks  # what the first rank says here is the same for all
        self._first_pid = ranks.max(os.getpid() if ranks.first else 0)
        self._token = ranks.max(secrets.randbits(62) if ranks.first else 0)
        self._attempt = ranks.max(identity.attempt if ranks.first else 0)
        self._apart = (
            ranks_apart(ranks, self._checkpoints, self._token) if policy.store is not None else set()
        )
        self._object_store = open_store(policy.store) if policy.store is not None and self._apart else None
        self._lost: BuckeyeError | None = None  # why the newest checkpoint is not in the store

    @classmethod
    def of(
        cls, config: TrainerConfig | SFTConfig, learner: Learner, identity: RunIdentity, metrics: MetricsLog
    ) -> Output:
        """The output of a configured run."""
        policy = CheckpointPolicy(
            interval=config.ckpt.interval if config.ckpt is not None else None,
            keep=config.ckpt.keep if config.ckpt is not None else None,
            timeout_seconds=config.dist_timeout_seconds,
            store=config.ckpt.store if config.ckpt is not None else None,
            store_seconds=config.ckpt.store_timeout if config.ckpt is not None else 0.0,
        )
        return cls(config.output_dir, learner, identity, metrics, policy, _stored(config, learner))

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            logger.error("A checkpoint was not written: %s", failure)  # beside what ends this process

    def publish(self, *, versions: int) -> None:
        """Make the present weights visible to the engines; only the newest `versions` remain. Raises what has
        gone wrong with a checkpoint in the meantime."""
        self._writing.check()
        learner, policy, step = self._learner, self._learner.policy, self._learner.progress.step
        adapter = has_adapter(policy.model)
        dtype = torch.float32 if adapter else self._stored.dtype or policy.compute_dtype
        with self.as_published():
            canary = greedy_canary(policy, dtype)
        tensors = self._published_tensors(dtype)
        publish = partial(
            publish_weights,
            self._weights,
            step,
            lambda directory: save_weights(
                policy.model, learner.tokenizer_files, directory, dtype=dtype, tensors=tensors
            ),
            identity=self._identity,
            dtype=str(dtype).removeprefix("torch."),
            canary=canary,
            adapter=adapter,
        )
        if learner.ranks.first:
            fault_point("weights.publish")
        path, what = self._weights / f"step_{step}", f"the weights of step {step}"
        write_together(learner.ranks, Writing(path, publish, what=what, needed=None))
        if not learner.ranks.first:
            return
        fault_point("weights.published")
        prune_weights(self._weights, self._identity.run_id, keep=lambda v: step - versions < v <= step)

    def _published_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What is trained, whole, as it is stored, on the first rank; nothing on the others."""
        stored = self._stored
        if dtype is torch.float16 or stored.stochastic:
            exact = self._learner.model_tensors(torch.float32)
            return stored_as(exact, dtype, stochastic=stored.stochastic, seed=stored.seed)
        return self._learner.model_tensors(dtype)

    def served(self, *, interval: int) -> ServedWeights | None:
        """Compares what is trained with what is published; None where that cannot be, or is the same."""
        learner, stored = self._learner, self._stored
        dtype = stored.dtype or learner.policy.compute_dtype
        whole = learner.ranks.first and learner.ranks.mesh is None
        if not whole or dtype is torch.float32 or has_adapter(learner.policy.model):
            return None

        return ServedWeights(learner.policy, partial(self._store, dtype), interval=interval)

    def _store(self, dtype: torch.dtype, name: str, values: torch.Tensor) -> torch.Tensor:
        """A parameter as it is published, where it is."""
        stored = self._stored
        exact = {name: values.cpu() if stored.stochastic else values}
        rounded = stored_as(exact, dtype, stochastic=stored.stochastic, seed=stored.seed)[name]
        return rounded.to(values.device)

    @contextmanager
    def as_published(self) -> Iterator[None]:
        """Within it the policy has the weights that are sampled with. Those that are rounded to nearest it
        computes with in any case, when it casts them; those that are rounded stochastically replace the exact
        ones, which come back at the end."""
        if not self._stored.stochastic:
            yield
            return
        trained = self._learner.policy.trainable
        exact = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = self._store(torch.bfloat16, name, exact[name]).to(parameter.dtype)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = exact[name]

    def due(self) -> bool:
        """Whether a checkpoint is to be written after the step that was just done."""
        interval = self._policy.interval
        return interval is not None and self._learner.progress.step % interval == 0

    def checkpoint(self, loop_state: Mapping[str, Any], *, protected: Collection[int] = ()) -> None:
        """Copy the present state and begin to write it, unless this process has written it, or started from
        it. Waits for the checkpoint before. `loop_state` is what the loop needs to go on; checkpoints of
        `protected` steps are never deleted."""
        step = self._learner.progress.step
        if step == self._saved:
            return
        self._saved = step
        began = time.monotonic()
        self._wait_together()
        captured = capture_state(self._learner)
        blocked = time.monotonic() - began
        fault_point("checkpoint.captured")
        if self._learner.ranks.first:
            logger.info("Saving checkpoint at step %d", step)
            save = partial(self._save, captured, loop_state, frozenset(protected), blocked)
        elif captured.divided:
            save = partial(self._save_part, captured)
        else:
            return
        self._writing.start(f"the checkpoint of step {step}", partial(self._or_go_on, save, step))

    def wait(self) -> None:
        """Until everything is written."""
        self._writing.wait()
        if self._lost is not None:
            raise self._lost

    def _or_go_on(self, save: Callable[[], None], step: int) -> None:
        """What cannot be handed in at the store ends no training, unless it is the last."""
        self._lost = None
        try:
            save()
        except (StoreError, CheckpointError) as error:
            if self._object_store is None:
                raise
            self._lost = error
            logger.warning("There is no checkpoint of step %d; training goes on. %s", step, error)

    def _wait_together(self) -> None:
        """The same on all ranks. None of them is in a collective meanwhile, where it may wait less long than
        for disk space."""
        if self._learner.ranks.count > 1:
            while self._learner.ranks.max(int(self._writing.busy)):
                time.sleep(_POLL_SECONDS)
        self._writing.wait()

    def _save(
        self, captured: Captured, state: Mapping[str, Any], protected: Collection[int], blocked: float
    ) -> None:
        """What the first rank does, on a thread beside training: write, commit, delete old ones, tell."""
        began, step = time.monotonic(), captured.progress.step
        commit = partial(
            save_checkpoint,
            self._checkpoints,
            step,
            partial(self._fill, captured),
            orchestrator_state=state,
            identity=self._identity,
            upload=self._upload,
        )
        try:
            path = write_when_room(
                self._checkpoints / f"step_{step}", commit, what=f"the checkpoint of step {step}"
            )
        finally:
            shutil.rmtree(self._staging(step), ignore_errors=True)
        self._prune(protected)
        seconds, size = time.monotonic() - began, size_of(path)
        logger.info("Saved checkpoint at step %d: %s in %.1f s", step, human_bytes(size), seconds)
        values = {"seconds_blocked": blocked, "seconds_written": seconds, "bytes": size}
        self._metrics.write("checkpoint", step, values)

    def _fill(self, captured: Captured, directory: Path) -> Mapping[str, str]:
        """Write the trainer's part of a checkpoint; returns the hashes of the shards."""
        write_state(self._learner, directory, captured)
        if not captured.divided:
            return {}
        self._save_part(captured)
        staging, ranks = self._staging(captured.progress.step), self._learner.ranks.count
        hashes = await_parts(
            staging,
            ranks,
            self._token,
            timeout_seconds=self._policy.store_seconds if self._apart else self._policy.timeout_seconds,
            look=partial(self._look, captured.progress.step),
        )
        shutil.copytree(staging, directory / SHARDS_DIRECTORY, copy_function=link_or_copy)
        return {f"{SHARDS_DIRECTORY}/{name}": digest for name, digest in hashes.items()}

    def _save_part(self, captured: Captured) -> None:
        """Write this rank's shards to where the first rank looks for them."""
        rank, step = self._learner.ranks.rank, captured.progress.step
        staging = self._staging(step)
        write_when_room(
            staging,
            lambda: write_pieces(staging, rank, self._token, captured.pieces),
            what=f"the shards of rank {rank} of step {step}",
            needed=sum(piece.content.nbytes for piece in captured.pieces.values()),
        )
        if rank in self._apart:
            self._hand_in(staging, step)

    def _hand_in(self, staging: Path, step: int) -> None:
        """Send this rank's shards to the store, what says that they are there last; keep nothing of them."""
        assert self._object_store is not None
        store, part = self._object_store, part_path(staging, self._learner.ranks.rank)
        for path in (part, part.with_suffix(".json")):
            file = {f"trainer/{SHARDS_DIRECTORY}/{path.name}": path}
            store.patiently(partial(store.send, file, self._name(step)), seconds=self._policy.store_seconds)
        shutil.rmtree(staging, ignore_errors=True)
        if local_rank() == 0:
            prune_checkpoints(self._checkpoints, 1)  # what was brought here to go on from

    def _look(self, step: int) -> None:
        """Have here what ranks elsewhere say of shards that are in the store."""
        for rank in self._apart:
            path = part_path(self._staging(step), rank).with_suffix(".json")
            if self._object_store is not None and not path.exists():
                time.sleep(_STORE_POLL_SECONDS)
                name = f"{self._name(step)}/trainer/{SHARDS_DIRECTORY}/{path.name}"
                with suppress(StoreError):  # there is a deadline
                    said = self._object_store.read_small(name)
                    if said is not None:
                        write_file(path, said)

    def _upload(self, directory: Path, commit: Mapping[str, Any]) -> None:
        """Commit to the store, where shards of others are that are not in this directory."""
        if self._object_store is not None and has_shards(directory / "trainer"):
            store = self._object_store
            send = partial(store.upload, directory, commit, self._name(commit["step"]), self._run)
            store.patiently(send, seconds=self._policy.store_seconds)

    def _name(self, step: int) -> str:
        return f"step_{step}-attempt_{self._attempt}-{self._token:016x}"

    def _staging(self, step: int) -> Path:
        """Where all ranks put their shards: by its name a temporary file of the first rank's process; of
        those that have another directory, of their own."""
        pid = os.getpid() if self._learner.ranks.rank in self._apart else self._first_pid
        return self._checkpoints / f".step_{step}.{SHARDS_DIRECTORY}.tmp-{pid}"

    def _prune(self, protected: Collection[int]) -> None:
        if self._policy.keep is None:
            return
        try:
            best = best_by_reward(list_checkpoints(self._checkpoints), read_scores(self._run))
        except BuckeyeError as error:
            logger.warning("No old checkpoint is deleted, since the best one is not known: %s", error)
            return
        kept = {*protected, best.info.step} if best is not None else protected
        prune_checkpoints(self._checkpoints, self._policy.keep, protected=kept)


def _stored(config: TrainerConfig | SFTConfig, learner: Learner) -> Stored:
    if isinstance(config, SFTConfig):
        return Stored()
    weights, policy, divided = config.weights, learner.policy, learner.ranks.mesh is not None
    named = None if weights.dtype == "auto" else getattr(torch, weights.dtype)
    stochastic = weights.rounding == "stochastic"
    if weights.rounding == "auto" and not divided and not has_adapter(policy.model):
        stochastic = policy.device.type == "cpu" and (named or policy.compute_dtype) is torch.bfloat16
    if stochastic and divided:
        raise UsageError(
            'trainer.weights.rounding = "stochastic" is for a model that is whole on each rank, and this one '
            "is divided: leave it out."
        )
    return Stored(
        dtype=torch.bfloat16 if stochastic else named,
        stochastic=stochastic,
        seed=config.seed,
    )


_THREAD_POLL_SECONDS = 0.5
_TELL_SECONDS = 60.0


class Background:
    """Runs one piece of work at a time on a thread. What it raises is raised here, later."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Begin some work; `what` names it in messages. Waits for the one before."""
        self.wait()
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(work,), name=what, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether some work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what the work has raised, if it has by now."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until the work is done; then as `check`. It has deadlines of its own for all that it waits for."""
        began = told = time.monotonic()
        thread = self._thread
        if thread is not None and thread.is_alive():
            logger.info("Waiting for %s, which is still being written", self._what)
        while thread is not None and thread.is_alive():
            heartbeat.report(f"{self._what} to be written", on="disk")
            thread.join(_THREAD_POLL_SECONDS)
            if time.monotonic() > told + _TELL_SECONDS:
                told = time.monotonic()
                logger.info("Still waiting for %s, for %.0f s", self._what, told - began)
        self._thread = None
        self.check()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
