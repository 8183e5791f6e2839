"""Weights & Biases: one run there for all processes of a run here.

A thread of the launcher follows `metrics.jsonl` and sends every step when all of it is known. No process of
the run knows of it, so none waits for it or fails with it, and a process that is started again goes on being
logged.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import read_json, write_file
from buckeye.config.shared import BaseConfig, WandbConfig, WandbExtrasConfig
from buckeye.errors import UsageError
from buckeye.monitor.metrics import HEAD, MetricsTail, RunMetrics, Step
from buckeye.monitor.redact import redacted
from buckeye.monitor.rollouts import read_rollouts

# Sample rollouts and distributions of a step, as Weights & Biases shows them.

_SAMPLES = 8
_MOST_CHARACTERS = 4000
_COLUMNS = ("env", "task_id", "reward", "stop_reason", "error", "completion_tokens")


def sample_values(run: Path, step: int, extras: WandbExtrasConfig) -> dict[str, Any]:
    """A table of the first rollouts that a step trained on, and histograms of reward and length; empty if
    there are none."""
    import wandb

    played = [rollout for rollout in read_rollouts(run, step)[0] if rollout.dropped is None]
    if not played:
        return {}
    values: dict[str, Any] = {}
    if extras.samples:
        rows = [[*(getattr(r, column) for column in _COLUMNS), _text(r.text)] for r in played[:_SAMPLES]]
        values["samples"] = wandb.Table(columns=[*_COLUMNS, "text"], data=rows)
    if extras.distributions:
        rewards = [r.reward for r in played if r.reward is not None]
        lengths = [r.completion_tokens for r in played]
        if rewards:
            values["distributions/reward"] = wandb.Histogram(rewards)
        values["distributions/completion_tokens"] = wandb.Histogram(lengths)
    return values


def _text(segments: Sequence[str]) -> str:
    """All segments, cut where it is too long to be shown."""
    text = "\n\n".join(segments)
    cut = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} ... ({cut} more characters)" if cut > 0 else text


log = logging.getLogger(__name__)


# Weights & Biases: one run there for all processes of a run here.

WANDB_FOLDER = "wandb"
"""What Weights & Biases writes in a run directory."""

_POSITION = "position.json"
_POLL_SECONDS = 1.0
_INIT_SECONDS = 30.0
_UPLOAD_SECONDS = 60.0
_FINISH_SECONDS = 90.0


def check_wandb(settings: WandbConfig | None) -> None:
    """Raise UsageError if a run with these settings could not be logged: the library is not installed, or
    there is no key for the server."""
    if settings is None or _mode(settings) == "disabled":
        return
    need("wandb", "Logging to Weights & Biases")
    if _mode(settings) == "online" and not _has_key():
        raise UsageError(
            "wandb: no key for Weights & Biases. Type `buckeye auth set WANDB_API_KEY`, or add "
            "--wandb.offline"
        )


@contextmanager
def tracked(
    settings: WandbConfig | None, *, output_dir: Path, run_id: str, config: BaseConfig
) -> Iterator[None]:
    """Send what the run writes to `metrics.jsonl` during the block, if `settings` ask for it.

    What Weights & Biases cannot take is a warning and never an error: all numbers are in `metrics.jsonl`.
    """
    if settings is None or _mode(settings) == "disabled":
        yield
        return
    follower = _Follower(settings, output_dir, run_id, config)
    follower.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        follower.finish(failed=failed)


class _Follower:
    """The thread, and how far it is."""

    def __init__(self, settings: WandbConfig, output_dir: Path, run_id: str, config: BaseConfig) -> None:
        self._settings = settings
        self._output_dir = output_dir.absolute()
        self._run_id = settings.id or run_id
        self._config = redacted(config.model_dump(mode="json"))
        self._position = self._output_dir / WANDB_FOLDER / _POSITION
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, *, failed: bool) -> None:
        """Send the rest. Gives up after a while; what is on the disk can be sent later."""
        self._failed = failed
        self._ended.set()
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "Weights & Biases has not taken everything within %.0f s. The rest: wandb sync %s",
                _FINISH_SECONDS,
                self._output_dir / WANDB_FOLDER,
            )

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # whatever the library raises: the run is worth more than its picture
            log.warning(
                "Weights & Biases: %s. The run goes on without; all numbers are in %s",
                _reason(error),
                self._output_dir / "metrics.jsonl",
            )

    def _follow(self) -> None:
        run = self._begin()
        tail = MetricsTail(self._output_dir / "metrics.jsonl", self._sent_before())
        metrics = RunMetrics()
        while True:
            last = self._ended.is_set()
            for record in tail.new():
                metrics.add(record)
            for step in metrics.take(rest=last):
                run.log(self._values(step))
            if last:
                break
            self._ended.wait(_POLL_SECONDS)
        run.finish(exit_code=int(self._failed))
        # not before: what the library was given it may hold in memory, and lose with the process
        write_file(self._position, json.dumps({"id": self._run_id, "position": tail.position}))

    def _begin(self) -> Any:
        """Open the run: on the server, or on the disk if that is wanted or the server is out of reach."""
        import wandb

        self._position.parent.mkdir(parents=True, exist_ok=True)
        if _mode(self._settings) == "online":
            try:
                run = self._init("online")
            except Exception as error:  # network, rights, quota: whatever it is, the disk takes the numbers
                log.warning("Weights & Biases cannot be used: %s", _reason(error))
                wandb.teardown()  # its process still holds the id
            else:
                log.info("Weights & Biases: %s", run.url)
                return run
        run = self._init("offline")
        folder = run.settings.sync_dir
        log.info("Weights & Biases: offline, in %s; to send it later: wandb sync %s", folder, folder)
        return run

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        run = wandb.init(
            project=self._settings.project,
            name=self._settings.name or self._output_dir.name,
            id=self._run_id,
            resume="allow" if mode == "online" else None,  # offline, the server does when it is sent
            dir=self._output_dir,
            config=self._config,
            mode=mode,
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,  # it would send the command line, the user and host names
                x_disable_meta=True,
                api_key=key("WANDB_API_KEY") or None,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
            ),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # an evaluation may come after a later step
        return run

    def _sent_before(self) -> int:
        """Where the last attempt that ended in good order had come to. What a killed one has sent is sent
        again: a record twice is harmless where the horizontal axis is the step, and a gap is not."""
        try:
            sent = read_json(self._position)
        except FileNotFoundError:
            return 0
        return int(sent["position"]) if sent["id"] == self._run_id else 0

    def _values(self, step: Step) -> dict[str, Any]:
        values = {"step": step.number}
        for process, record in step.records.items():
            values |= {f"{process}/{name}": value for name, value in record.items() if name not in HEAD}
        extras = self._settings.log_extras
        if "orchestrator" in step.records and extras is not None and step.number % extras.interval == 0:
            values |= sample_values(self._output_dir, step.number, extras)
        return values


def _mode(settings: WandbConfig) -> Literal["online", "offline", "disabled"]:
    """WANDB_MODE can only send less than the settings say."""
    variable = os.environ.get("WANDB_MODE", "online")
    if variable == "disabled":
        return "disabled"
    return "offline" if settings.offline or variable in ("offline", "dryrun") else "online"


def _has_key() -> bool:
    """Whether the library will find a key without asking for one."""
    if key("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
