"""Trackio and TensorBoard, as alternatives to Weights & Biases. Their libraries are imported when used."""

from __future__ import annotations

import logging

from buckeye.monitor.metrics import StepMetrics
from buckeye.monitor.tracker import Tracker, step_values

log = logging.getLogger(__name__)


class TrackioTracker(Tracker):
    """Tracker in Trackio's database, or in a Space of the Hugging Face hub."""

    title, folder = "Trackio", "trackio"

    def begin(self) -> None:
        import trackio

        self._run = trackio.init(
            project=self.settings.project,
            name=self.settings.name or self.output_dir.name,
            space_id=self.settings.space,
            private=True,
            config={"run_id": self.run_id, **self.config},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: StepMetrics) -> None:
        self._run.log(step_values(step), step=step.number)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class TensorboardTracker(Tracker):
    """Tracker that writes TensorBoard event files to a directory."""

    title, folder = "TensorBoard", "tensorboard"

    def begin(self) -> None:
        from tensorboard.summary import Writer

        directory = self.settings.log_dir or self.output_dir / self.folder
        self._writer = Writer(str(directory))
        log.info("TensorBoard: tensorboard --logdir %s", directory)

    def log(self, step: StepMetrics) -> None:
        for name, value in step_values(step).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, float(value), step.number)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        self._writer.close()
