"""Weights & Biases, Trackio and TensorBoard: one run there for all processes of a run here.

For each of them a thread of the launcher follows `metrics.jsonl` and sends every step when all of it is
known. No process of the run knows of it, so none waits for it or fails with it, and a process that is started
again goes on being logged.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from buckeye.base.distribution import ask, need
from buckeye.base.keys import key
from buckeye.base.storage import read_json, write_file
from buckeye.config.shared import (
    BaseConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)
from buckeye.errors import UsageError
from buckeye.monitor.metrics import HEAD, MetricsTail, RunMetrics, Step
from buckeye.monitor.redact import redacted
from buckeye.monitor.wandb_samples import sample_values

log = logging.getLogger(__name__)


# What the numbers are sent to.

TRACKER_FOLDERS = ("wandb", "trackio", "tensorboard")
"""What they write in a run directory."""

Settings = WandbConfig | TrackioConfig | TensorboardConfig

_POSITION = "position.json"
_POLL_SECONDS = 1.0
_INIT_SECONDS = 30.0
_UPLOAD_SECONDS = 60.0
_FINISH_SECONDS = 90.0


def check_trackers(settings: Iterable[Settings]) -> None:
    """Raise UsageError if a run with these settings could not be logged: a library is not installed, or
    there is no key for the server."""
    for one in _wanted(settings):
        kind = tracker_of(one)
        need(kind.folder, f"Logging to {kind.title}")
        if isinstance(one, WandbConfig) and _mode(one) == "online" and not _has_key():
            raise UsageError(
                "wandb: no key for Weights & Biases. Type `buckeye auth set WANDB_API_KEY`, or add "
                "--wandb.offline"
            )


@contextmanager
def tracked(
    settings: Iterable[Settings], *, output_dir: Path, run_id: str, config: BaseConfig
) -> Iterator[None]:
    """Send what the run writes to `metrics.jsonl` during the block, where `settings` ask for it.

    What a tracker cannot take is a warning and never an error: all numbers are in `metrics.jsonl`.
    """
    described = redacted(config.model_dump(mode="json"))
    followers = [
        _Follower(tracker_of(one)(one, output_dir.absolute(), getattr(one, "id", None) or run_id, described))
        for one in _wanted(settings)
    ]
    failed = True
    try:
        yield
        failed = False
    finally:
        for follower in followers:
            follower.end(failed=failed)
        deadline = time.monotonic() + _FINISH_SECONDS  # of all of them
        for follower in followers:
            follower.wait(deadline)


def _wanted(settings: Iterable[Settings]) -> list[Settings]:
    return [one for one in settings if not isinstance(one, WandbConfig) or _mode(one) != "disabled"]


@dataclass
class Tracker:
    """What numbers are sent to, as the run `run_id` there. `begin`, `log` and `finish` may raise anything;
    `folder` is that in the run directory, and the name of the module and of the extra."""

    settings: Any
    output_dir: Path
    run_id: str
    config: Any
    title: ClassVar[str]
    folder: ClassVar[str]

    def begin(self) -> None:
        """Open what is logged to."""

    def log(self, step: Step) -> None:
        """Send what is known of a step."""

    def finish(self, *, failed: bool) -> None:
        """Send the rest; the run is over."""

    @property
    def rest(self) -> str:
        """Where what was not sent is, or how to send it."""
        return str(self.output_dir / "metrics.jsonl")


class _Follower:
    """The thread of a tracker, and how far it is."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._position = tracker.output_dir / tracker.folder / _POSITION
        self._metrics = tracker.output_dir / "metrics.jsonl"
        self._ended = threading.Event()
        self._failed = False
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=tracker.folder, daemon=True)
        self._thread.start()

    def end(self, *, failed: bool) -> None:
        """The run is over; the rest is sent."""
        self._failed = failed
        self._ended.set()

    def wait(self, deadline: float) -> None:
        """Until all is sent. Gives up at the deadline; what is on the disk can be sent later."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "%s has not taken everything within %.0f s. The rest: %s",
                self._tracker.title,
                _FINISH_SECONDS,
                self._tracker.rest,
            )

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # whatever the library raises: the run is worth more than its picture
            why = f"{self._tracker.title}: {_reason(error)}"
            log.warning("%s. The run goes on without; all numbers are in %s", why, self._metrics)

    def _follow(self) -> None:
        self._tracker.begin()
        tail = MetricsTail(self._metrics, self._sent_before())
        metrics = RunMetrics()
        while True:
            last = self._ended.is_set()
            for record in tail.new():
                metrics.add(record)
            for step in metrics.take(rest=last):
                self._log(step)
            if last:
                break
            self._ended.wait(_POLL_SECONDS)
        self._tracker.finish(failed=self._failed)
        if self._lost:
            log.warning("%s lacks %d steps, which are in %s", self._tracker.title, self._lost, self._metrics)
            return
        # not before: what the library was given it may hold in memory, and lose with the process
        write_file(self._position, json.dumps({"id": self._tracker.run_id, "position": tail.position}))

    def _log(self, step: Step) -> None:
        """A step that is not taken is counted, the first also told."""
        try:
            self._tracker.log(step)
        except Exception as error:
            self._lost += 1
            if self._lost == 1:
                log.warning("%s does not take step %d: %s", self._tracker.title, step.number, _reason(error))

    def _sent_before(self) -> int:
        """Where the last attempt that ended in good order had come to. What a killed one has sent is sent
        again: a record twice is harmless where the horizontal axis is the step, and a gap is not."""
        try:
            sent = read_json(self._position)
        except FileNotFoundError:
            return 0
        return int(sent["position"]) if sent["id"] == self._tracker.run_id else 0


def numbers_of(step: Step) -> dict[str, Any]:
    """All that was recorded of a step, as `<process>/<name>`."""
    return {
        f"{process}/{name}": value
        for process, record in step.records.items()
        for name, value in record.items()
        if name not in HEAD
    }


class _Wandb(Tracker):
    """On the server, or on the disk if that is wanted or the server is out of reach."""

    title, folder = "Weights & Biases", "wandb"

    def begin(self) -> None:
        import wandb

        (self.output_dir / self.folder).mkdir(parents=True, exist_ok=True)
        if _mode(self.settings) == "online":
            try:
                self._run = self._init("online")
            except Exception as error:  # network, rights, quota: whatever it is, the disk takes the numbers
                log.warning("Weights & Biases cannot be used: %s", _reason(error))
                wandb.teardown()  # its process still holds the id
            else:
                log.info("Weights & Biases: %s", self._run.url)
                return
        self._run = self._init("offline")
        folder = self._run.settings.sync_dir
        log.info("Weights & Biases: offline, in %s; to send it later: wandb sync %s", folder, folder)

    def log(self, step: Step) -> None:
        values = {"step": step.number, **numbers_of(step)}
        extras = self.settings.log_extras
        if "orchestrator" in step.records and extras is not None and step.number % extras.interval == 0:
            values |= sample_values(self.output_dir, step.number, extras)
        self._run.log(values)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    @property
    def rest(self) -> str:
        return f"wandb sync {self.output_dir / self.folder}"

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        run = wandb.init(
            project=self.settings.project,
            name=self.settings.name or self.output_dir.name,
            id=self.run_id,
            resume="allow" if mode == "online" else None,  # offline, the server does when it is sent
            dir=self.output_dir,
            config=self.config,
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


def tracker_of(settings: Settings) -> type[Tracker]:
    """What is meant by some settings. Raises UsageError where its distribution is not installed."""
    if isinstance(settings, WandbConfig):
        return _Wandb
    name = type(settings).__name__.removesuffix("Config")
    found: type[Tracker] = ask(f"buckeye.monitor.trackers:{name}", f"Logging to {name}")
    return found


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
