"""Writer of the trainer's output: it publishes weights and writes checkpoints in background threads."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from buckeye.base import heartbeat
from buckeye.base.disk import human_bytes, size_of, wait_for_room, write_when_room
from buckeye.base.faults import fault_point
from buckeye.base.process import RunIdentity
from buckeye.base.storage import link_or_copy
from buckeye.base.turns import turns
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.metrics import MetricsLog
from buckeye.trainer.learner import Learner
from buckeye.trainer.model.adapter_files import has_adapter, save_weights, stored_name
from buckeye.trainer.output.background_thread import BackgroundThread
from buckeye.trainer.output.broadcast import Broadcaster
from buckeye.trainer.output.state import OPTIMIZER_DIRECTORY, TrainingState, capture_state, write_state
from buckeye.trainer.output.stored_weights import StoredWeights, read_stored_weights
from buckeye.trainer.output.weight_rounding import (
    RoundingMonitor,
    canary_prompt,
    empty_published,
    make_canary,
    round_tensor,
)
from buckeye.trainer.parallel.fsdp import gather_tensor
from buckeye.trainer.parallel.ranks import check_shared_folder, write_on_rank_zero
from buckeye.trainer.parallel.shards import create_checkpoint_group, is_model_sharded, save_shards
from buckeye.transport.batches import BatchDamageError, Sample
from buckeye.transport.checkpoint import (
    find_best_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_scores,
    save_checkpoint,
)
from buckeye.transport.weights import make_manifest, prune_weights, publish_weights

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_PUBLISH_SECONDS = 1800.0
"""Maximum time to write a version of the weights."""


class OutputWriter:
    """Writer of `weights/` and `checkpoints/` of a run. All ranks must call its methods.

    `publish` and `checkpoint` copy the weights or the state in memory, and threads write the copies while
    training continues. At the end of the context, the writer waits until both are written.
    """

    def __init__(
        self, config: TrainerConfig | SFTConfig, learner: Learner, identity: RunIdentity, metrics: MetricsLog
    ) -> None:
        self._run = config.output_dir
        self._weights = self._run / "weights"
        self._checkpoints = self._run / "checkpoints"
        self._learner = learner
        self._identity = identity
        self._metrics = metrics
        self._settings = config.ckpt
        self._dtype, self._stochastic = _weight_format(config, learner)
        self._seed = config.seed
        self._canary_prompt = canary_prompt(learner.tokenizer_files, learner.policy.vocab_size)
        self._last_step = learner.progress.step
        self._background = BackgroundThread()
        self._publication = BackgroundThread(timeout=_PUBLISH_SECONDS)
        self._stored: StoredWeights | None = None
        self._published: Mapping[str, torch.Tensor] = {}  # the newest values, if they stay in memory
        self._is_first = True
        self._canary_tokens: list[int] = []
        self._publish_seconds: float | None = None
        weights = config.weights if isinstance(config, TrainerConfig) else None
        self._measure_interval = weights.measure_interval if weights is not None else None
        self._rounding_monitor: RoundingMonitor | None = None
        ranks = learner.ranks
        self._group: ProcessGroup | None = None
        if is_model_sharded(ranks) and not has_adapter(learner.policy.model):
            check_shared_folder(ranks, self._checkpoints)
            self._group = create_checkpoint_group(timeout_seconds=config.dist_timeout_seconds)
        self._broadcaster: Broadcaster | None = None
        if isinstance(config, TrainerConfig) and ranks.is_rank_zero:
            transport, adapted = config.weights.transport, has_adapter(learner.policy.model)
            self._broadcaster = Broadcaster(self._run, transport, has_adapter=adapted)
        self._rank_zero_pid = ranks.max(os.getpid() if ranks.is_rank_zero else 0)

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            # Only log the failure. The error that ended the context is more important.
            logger.error("Output not written: %s", failure)

    def publish(
        self, *, versions: int, durable: bool, samples: Iterable[Sample] | None = None
    ) -> dict[str, float]:
        """Copy the current weights, and start to publish the copy. Sync it to disk if `durable`.

        Wait for the previous version first; the first version is published before this method returns. Delete
        all but the newest `versions`. If the thread failed to write a checkpoint, raise its error.

        Return the seconds to publish the previous version, and the metrics of `RoundingMonitor` on `samples`
        if they are due.
        """
        self._background.check()
        learner, policy, step = self._learner, self._learner.policy, self._learner.progress.step
        self.wait_published()
        seconds_before = self._take_publish_seconds()  # before the thread of this version sets its own
        adapter = has_adapter(policy.model)
        dtype = torch.float32 if adapter else self._dtype or policy.compute_dtype
        tensors = self._published = self._published_tensors(dtype)
        with self.use_published_weights():
            canary = make_canary(policy, dtype, prompt=self._canary_prompt, guess=self._canary_tokens)
        if learner.ranks.mesh is None:
            self._canary_tokens = canary.token_ids
        rounding = self._measure_rounding(dtype, tensors, samples)
        if turns() is not None and policy.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine wakes up when it finds the weights
        stored = self._stored
        if stored is None:
            self._published = {}
        facts: dict[str, Any] = {
            "identity": self._identity,
            "dtype": str(dtype).removeprefix("torch."),
            "canary": canary,
            "adapter": adapter,
        }

        def fill(digests: Mapping[str, str] | None, directory: Path) -> Mapping[str, str] | None:
            if stored is not None:
                return stored.write(directory, digests)
            save_weights(policy.model, learner.tokenizer_files, directory, dtype=dtype, tensors=tensors)
            return None

        def publish() -> None:
            began = time.monotonic()
            fault_point("weights.publish")
            digests = self._offer(step, stored, facts)
            path, contents = self._weights / f"step_{step}", partial(fill, digests)
            write = partial(publish_weights, self._weights, step, contents, durable=durable, **facts)
            write_when_room(path, write, what=f"the weights of step {step}")
            fault_point("weights.published")
            prune_weights(self._weights, self._identity.run_id, keep=lambda v: step - versions < v <= step)
            seconds = self._publish_seconds = time.monotonic() - began
            if stored is not None and self._broadcaster is not None:
                self._broadcaster.choose(stored, seconds)

        if learner.ranks.is_rank_zero:
            self._publication.start(f"the weights of step {step}", publish)
        if self._is_first:
            self._is_first = False
            self.wait_published()
            if learner.ranks.is_rank_zero:
                name = stored_name if adapter else str
                pinned = policy.device.type == "cuda"
                directory = self._weights / f"step_{step}"
                self._stored = read_stored_weights(directory, tensors, name, pinned=pinned)
                if self._broadcaster is not None:
                    self._broadcaster.choose(self._stored)
        return rounding | seconds_before

    def _offer(
        self, step: int, stored: StoredWeights | None, facts: Mapping[str, Any]
    ) -> dict[str, str] | None:
        """Offer a version for broadcast. Return the digests of its files, or None if it is not broadcast."""
        if stored is None or self._broadcaster is None or not self._broadcaster.is_used:
            return None
        digests = stored.digests()
        self._broadcaster.offer(make_manifest(step, digests, **facts), stored)
        return digests

    def when_published(self, work: Callable[[], None]) -> None:
        """Call `work` in the thread after the current publication. Only rank 0 calls this."""
        self._publication.then(work)

    def check(self) -> None:
        """Raise the error of a background thread, if one has failed."""
        self._publication.check()
        self._background.check()

    def wait_published(self) -> None:
        """Wait until the weights are published. All ranks must call this method."""
        write_on_rank_zero(self._learner.ranks, self._wait_publication)

    def _wait_publication(self) -> None:
        self._publication.wait()
        if self._broadcaster is not None:
            self._broadcaster.finish()

    def _take_publish_seconds(self) -> dict[str, float]:
        """Return the seconds in which threads published and broadcast the last version, once, as metrics."""
        seconds, self._publish_seconds = self._publish_seconds, None
        broadcast = None if self._broadcaster is None else self._broadcaster.take_seconds()
        values = {"weights/publish_seconds": seconds, "weights/broadcast_seconds": broadcast}
        return {name: value for name, value in values.items() if value is not None}

    def _published_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return a copy of the trained tensors, unsharded and rounded, on rank 0. Return {} on other ranks.

        A tensor that has two names is rounded once.
        """
        is_writer, seed = self._learner.ranks.is_rank_zero, self._seed if self._stochastic else None
        rounded: dict[int, torch.Tensor | None] = {}
        local = self._learner.local_tensors()
        for name, tensor in local.items():
            if id(tensor) in rounded:
                continue
            full, rounded[id(tensor)] = gather_tensor(tensor), None
            if is_writer:
                stored = None if self._stored is None else self._stored.tensors[name]
                out = empty_published(full, dtype, torch.device("cpu")) if stored is None else stored
                rounded[id(tensor)] = round_tensor(name, full, seed=seed, out=out)
        copies = {name: rounded[id(tensor)] for name, tensor in local.items()}
        return {name: copy for name, copy in copies.items() if copy is not None}

    def _measure_rounding(
        self, dtype: torch.dtype, published: Mapping[str, torch.Tensor], samples: Iterable[Sample] | None
    ) -> dict[str, float]:
        """Compare trained and published weights if it is due.

        The first call only begins the comparison. Do nothing if the weights are equal, if the model is
        sharded, or on a rank other than 0.
        """
        learner, step = self._learner, self._learner.progress.step
        has_model = learner.ranks.is_rank_zero and learner.ranks.mesh is None
        if self._is_first and has_model and self._measure_interval is not None and dtype is not torch.float32:
            self._rounding_monitor = RoundingMonitor(
                learner.policy, published, interval=self._measure_interval
            )
        if self._rounding_monitor is None or samples is None or not self._rounding_monitor.is_due(step):
            return {}
        heartbeat.report(f"measures the rounding of weights {step}")
        try:
            return self._rounding_monitor.measure(published, samples)
        except BatchDamageError as error:  # of a sample that another rank computed
            logger.warning("Not measuring the rounding of weights %d: %s", step, error)
            return {}

    def _round(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter, rounded stochastically as in published weights, on the CPU."""
        out = empty_published(values, torch.bfloat16, torch.device("cpu"))
        return round_tensor(name, values, seed=self._seed, out=out)

    @contextmanager
    def use_published_weights(self, *, changed: bool = False) -> Iterator[None]:
        """Let the policy compute with the weights as published inside this context.

        `changed` weights differ from those of the last `publish`, so they are rounded again.

        With rounding to nearest, the context does nothing, because the policy's cast to the compute dtype
        rounds in this way. With stochastic rounding, rounded weights replace the exact weights. The end of
        the context restores the exact weights.
        """
        if not self._stochastic:
            yield
            return
        trained = self._learner.policy.trainable
        exact = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                rounded = None if changed else self._published.get(name)
                if rounded is None:
                    rounded = self._round(name, exact[name])
                parameter.data = rounded.to(parameter)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = exact[name]

    def is_due(self) -> bool:
        """Return True if a checkpoint is due after the current step."""
        interval = None if self._settings is None else self._settings.interval
        return interval is not None and self._learner.progress.step % interval == 0

    def checkpoint(self, loop_state: Mapping[str, Any], *, protected: Collection[int] = ()) -> None:
        """Wait for the previous checkpoint, copy the current state, and start to write the copy.

        Do nothing if this process has written a checkpoint of this step, or started from it. `loop_state` is
        the state of the orchestrator or of the data, for a resume. Old checkpoints are deleted, except those
        of `protected` steps.
        """
        step = self._learner.progress.step
        if step == self._last_step:
            return
        self._last_step = step
        began = time.monotonic()
        self._wait_together()
        captured = capture_state(self._learner)
        blocked = time.monotonic() - began
        fault_point("checkpoint.captured")
        if self._learner.ranks.is_rank_zero:
            logger.info("Saving checkpoint at step %d", step)
            save = partial(self._save, captured, loop_state, frozenset(protected), blocked)
        elif captured.is_sharded:
            save = partial(self._save_optimizer, captured)
        else:
            return
        self._background.start(f"the checkpoint of step {step}", save)

    def wait(self) -> None:
        """Wait until weights and checkpoint are written. Raise the error if writing failed."""
        self._wait_publication()
        self._background.wait()

    def _wait_together(self) -> None:
        """Wait until all ranks have written. Poll, because a long collective operation would time out."""
        if self._learner.ranks.world_size > 1:
            while self._learner.ranks.max(int(self._background.is_busy)):
                time.sleep(_POLL_SECONDS)
        self._background.wait()

    def _save(
        self, captured: TrainingState, state: Mapping[str, Any], protected: Collection[int], blocked: float
    ) -> None:
        """Write and commit a checkpoint on rank 0, delete old ones, and record metrics.

        The background thread calls this.
        """
        began, step = time.monotonic(), captured.progress.step
        commit = partial(
            save_checkpoint,
            self._checkpoints,
            step,
            partial(self._fill, captured),
            orchestrator_state=state,
            identity=self._identity,
        )
        try:
            if captured.is_sharded:
                self._save_optimizer(captured)
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

    def _fill(self, captured: TrainingState, directory: Path) -> None:
        """Write the trainer's files of a checkpoint into `directory`."""
        write_state(self._learner, directory, captured)
        if captured.is_sharded:
            shards = self._staging(captured.progress.step)
            shutil.copytree(shards, directory / OPTIMIZER_DIRECTORY, copy_function=link_or_copy)

    def _save_optimizer(self, captured: TrainingState) -> None:
        """Write the shards of the optimizer to the staging folder. All ranks must call it."""
        assert self._group is not None
        shards = self._staging(captured.progress.step)
        # Rank 0 is first: the other ranks start to write after a collective operation in `save_shards`.
        if self._learner.ranks.is_rank_zero:
            shutil.rmtree(shards, ignore_errors=True)
            needed = sum(tensor.nbytes for tensor in captured.optimizer.values())  # nbytes counts all shards
            wait_for_room(shards, what=f"the optimizer of step {captured.progress.step}", needed=needed)
        save_shards(shards, captured.optimizer, self._group)

    def _staging(self, step: int) -> Path:
        """Return the folder for shards. Its name is equal on all ranks, and marks it as temporary."""
        return self._checkpoints / f".step_{step}.{OPTIMIZER_DIRECTORY}.tmp-{self._rank_zero_pid}"

    def _prune(self, protected: Collection[int]) -> None:
        if self._settings is None or self._settings.keep is None:
            return
        try:
            best = find_best_checkpoint(list_checkpoints(self._checkpoints), read_scores(self._run))
        except BuckeyeError as error:
            logger.warning("Keeping all old checkpoints, because the best one is unknown: %s", error)
            return
        protected = {*protected, best.info.step} if best is not None else protected
        prune_checkpoints(self._checkpoints, self._settings.keep, protected=protected)


def _weight_format(config: TrainerConfig | SFTConfig, learner: Learner) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of published weights, and True to round stochastically. None is the compute dtype."""
    if isinstance(config, SFTConfig):
        return None, False
    weights, policy, is_sharded = config.weights, learner.policy, learner.ranks.mesh is not None
    dtype = None if weights.dtype == "auto" else getattr(torch, weights.dtype)
    stochastic = weights.rounding == "stochastic"
    if weights.rounding == "auto" and not is_sharded and not has_adapter(policy.model):
        stochastic = policy.device.type == "cpu" and (dtype or policy.compute_dtype) is torch.bfloat16
    if stochastic and is_sharded:
        raise UsageError(
            "stochastic rounding does not support a sharded model",
            code="BK-CONFIG-CONFLICT",
            at="trainer.weights.rounding",
            hint="leave it out",
        )
    return (torch.bfloat16, True) if stochastic else (dtype, False)
