"""Tracker of Weights & Biases, online or offline."""

from __future__ import annotations

import logging
import netrc
import os
from typing import Any, Literal
from urllib.parse import urlsplit

from buckeye.base.keys import key
from buckeye.config.shared import WandbConfig
from buckeye.monitor.metrics import StepMetrics
from buckeye.monitor.tracker import Tracker, error_summary, step_values
from buckeye.monitor.wandb_samples import sample_values

log = logging.getLogger(__name__)

_INIT_SECONDS = 30.0
_UPLOAD_SECONDS = 60.0


class WandbTracker(Tracker):
    """Tracker of Weights & Biases.

    It writes to disk if offline mode is set, or if the server is unreachable.
    """

    title, folder = "Weights & Biases", "wandb"

    def begin(self) -> None:
        import wandb

        (self.output_dir / self.folder).mkdir(parents=True, exist_ok=True)
        if wandb_mode(self.settings) == "online":
            try:
                self._run = self._init("online")
            except Exception as error:  # after any error, write to disk
                log.warning("Weights & Biases cannot be used: %s", error_summary(error))
                wandb.teardown()  # a process of the library still holds the run id
            else:
                log.info("Weights & Biases: %s", self._run.url)
                return
        self._run = self._init("offline")
        folder = self._run.settings.sync_dir
        log.info("Weights & Biases: offline, in %s; to send it later: wandb sync %s", folder, folder)

    def log(self, step: StepMetrics) -> None:
        values = {"step": step.number, **step_values(step)}
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
            resume="allow" if mode == "online" else None,  # offline runs resume when the server receives them
            dir=self.output_dir,
            config=self.config,
            mode=mode,
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,  # otherwise it sends the command line, user and host names
                x_disable_meta=True,
                api_key=key("WANDB_API_KEY") or None,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
            ),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # an evaluation may be recorded after a later step
        return run


def wandb_mode(settings: WandbConfig) -> Literal["online", "offline", "disabled"]:
    """Return the mode of the library: online, offline or disabled.

    The variable WANDB_MODE can turn uploads off, but cannot turn them on if the settings turn them off.
    """
    variable = os.environ.get("WANDB_MODE", "online")
    if variable == "disabled":
        return "disabled"
    return "offline" if settings.offline or variable in ("offline", "dryrun") else "online"


def has_wandb_key() -> bool:
    """Return True if the library will find a key without prompting."""
    if key("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
