"""What `rl report` says of a run, read from its directory."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from buckeye import __version__, runs
from buckeye.base.storage import read_json, step_directories
from buckeye.errors import BuckeyeError
from buckeye.monitor.intervals import Estimate, mean_over_tasks
from buckeye.monitor.redact import redacted
from buckeye.monitor.rollouts import PlayedRollout, rollout_steps
from buckeye.run_files.known_runs import known_runs
from buckeye.run_files.record import RunRecord, read_record
from buckeye.runs.checkpoint_facts import public_name, read_config, settings_of
from buckeye_audit.bands.band import Band, band_of
from buckeye_audit.diagnosis.diagnose import diagnose
from buckeye_audit.diagnosis.finding import Finding
from buckeye_audit.exchange.foreign import ForeignFolder
from buckeye_audit.report.gather import Report, ReportRequest, make_report
from buckeye_audit.report.plots import Panel

PICKED = (
    "Picked by rule: of the first step with texts the rollout with the median reward; of the last the "
    "highest reward, the median, the lowest, and the longest of those that failed or were cut off (of all, "
    "if none was). Of equals the one of the lowest group and number. Dropped groups count too."
)
_PANELS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("loss", {"": "loss", "validation": "validation/val_loss"}),
    ("gradient norm", {"": "grad_norm"}),
    ("entropy, nats a token", {"": "entropy"}),
    ("sampler against trainer, KL", {"": "mismatch_kl"}),
    ("left out of the loss", {"too low": "masked_low", "too high": "masked_high"}),
    ("age of the weights, steps", {"mean": "staleness_mean", "oldest": "staleness_max"}),
    ("groups without spread", {"all solved": "batch/solve_all", "none solved": "batch/solve_none"}),
    ("reply length, tokens", {"mean": "completion_len/mean", "longest": "completion_len/max"}),
    ("cut off", {"": "is_truncated/mean"}),
    ("tokens a second", {"trainer": "trainer/tokens_per_second", "sampler": "sampler/tokens_per_second"}),
    ("idle", {"trainer": "trainer/idle_ratio", "sampler": "sampler/idle_ratio"}),
    ("memory of the trainer, GiB", {"": "peak_memory_gib"}),
)
_GROUPS = (
    "SELECT step, task, avg(reward) FROM rollouts WHERE split = 'train' AND retried = 0 "
    "AND reward IS NOT NULL GROUP BY step, env, grp"
)
_CHOICE = (
    "SELECT reward, grp, number, completion_tokens, truncated FROM rollouts WHERE split = 'train' "
    "AND step = ? AND retried = 0 ORDER BY grp, number"
)
_COUNTS = (
    "SELECT count(*), sum(completion_tokens), sum(truncated), sum(reward IS NULL), count(DISTINCT task) "
    "FROM rollouts WHERE split = 'train'"
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run, and what is found in it when it is asked for. `baseline` says whether environments may be loaded
    to play policies without content; None does it for runs that were started here. `notes` fill with what
    could not be had. The run may be made of the results of another trainer, `foreign`."""

    run: runs.Run
    foreign: ForeignFolder | None = None
    baseline: bool | None
    notes: list[str]

    @property
    def name(self) -> str:
        return self.run.path.absolute().name

    @cached_property
    def record(self) -> RunRecord | None:
        try:
            return read_record(self.run.path)
        except BuckeyeError:
            return None

    @cached_property
    def kind_and_config(self) -> tuple[str, Mapping[str, Any]]:
        """`rl` or `sft`, and its settings without secrets; none where they cannot be read."""
        if self.foreign is not None:
            missing = f"no settings, logs and figures of training: {self.foreign.kind} keeps them elsewhere"
            self.notes.extend([missing, *self.foreign.unreadable])
            return "", {}
        try:
            kind, config = read_config(self.run.path)
        except BuckeyeError as error:
            self.notes.append(f"its settings cannot be read: {error}")
            return "", {}
        return kind, redacted(config)

    @cached_property
    def findings(self) -> Sequence[Finding]:
        done = diagnose(self.run.path)
        found, not_looked_at = done.findings, [*done.not_looked_at, *done.failures]
        self.notes.extend(note for note in not_looked_at if note not in self.notes)
        return found

    @cached_property
    def band(self) -> Band | None:
        return band_of(self.run)

    @cached_property
    def evaluations(self) -> list[Report]:
        """Of every environment that was evaluated, before and after."""
        folders = step_directories(self.run.path / "evals").values()
        names = sorted({path.stem for folder in folders for path in folder.glob("*.jsonl")})
        return [report for name in names if (report := self._evaluation(name)) is not None]

    def _evaluation(self, name: str) -> Report | None:
        asked = ReportRequest(env_id=name, run=self.run.path, baseline=self._may_load)
        try:
            return make_report(asked)
        except Exception as error:  # of an environment, whatever it raises
            self.notes.append(f"no baseline of {name}: {_first_line(error)}")
        try:
            return make_report(ReportRequest(env_id=name, run=self.run.path, baseline=False))
        except BuckeyeError as error:
            self.notes.append(f"no evaluation of {name}: {_first_line(error)}")
            return None

    @cached_property
    def _may_load(self) -> bool:
        if self.foreign is not None:
            return False
        if self.baseline is not None:
            return self.baseline
        here = any(
            known.directory.resolve() == self.run.path.resolve() and known.run_id == self._id
            for known in known_runs()[0]
        )
        if not here:
            self.notes.append(
                "no baseline: the run was not started by you here, so its environments are not loaded. "
                "--baseline does it"
            )
        return here

    @property
    def _id(self) -> str | None:
        return self.record.run_id if self.record is not None else None

    @cached_property
    def rewards(self) -> dict[int, Estimate]:
        """Step -> the mean reward of all that was played, over groups."""
        values: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for step, task, reward in self.run.query(_GROUPS):
            values[step].append((reward, task))
        return {
            step: mean_over_tasks([reward for reward, _ in found], [task for _, task in found])
            for step, found in sorted(values.items())
        }

    @cached_property
    def panels(self) -> list[Panel]:
        """The other figures, as far as they were recorded."""
        found = list[Panel]()
        for title, names in _PANELS:
            curves = {
                label: points
                for label, name in names.items()
                if (points := {s.number: v for s in self.run.steps if (v := s.value(name)) is not None})
            }
            if any(math.isfinite(value) for points in curves.values() for value in points.values()):
                found.append((title, curves))
        return found

    @cached_property
    def picked(self) -> list[tuple[str, int, PlayedRollout]]:
        """Why, step, and rollout; see `PICKED`. Each once."""
        steps = rollout_steps(self.run.path)
        chosen: dict[tuple[int, int, int], str] = {}
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            first = step == steps[0] and len(steps) > 1
            for why, (_, group, number, *_) in _picked(self.run.query(_CHOICE, step), first=first):
                chosen.setdefault((step, group, number), f"{why} of step {step}")
        found = [(why, place[0], self.run.text_of(*place)) for place, why in chosen.items()]
        return [(why, step, rollout) for why, step, rollout in found if rollout is not None]

    @property
    def settings(self) -> dict[str, str]:
        kind, config = self.kind_and_config
        if not config:
            return {}
        model = (config["trainer"] if kind == "rl" else config)["model"]["name"]
        return {"Model": public_name(str(model)), **settings_of(kind, config)}

    @property
    def cost(self) -> dict[str, str]:
        """What it took, as far as that is recorded."""
        played, sampled, cut, errored, tasks = self.run.query(_COUNTS)[0]
        trained = [step.trained for step in self.run.steps if step.trained is not None]
        peak = max((float(one.get("peak_memory_gib", 0)) for one in trained), default=0.0)
        seconds = self._seconds()
        found = {}
        if trained:
            found = {
                "Steps": f"{len(trained)}",
                "Time": f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min",
                "Tokens trained on": f"{sum(int(one.get('tokens', 0)) for one in trained):,}",
            }
        if played:
            failed = f"{cut:,} cut off, {errored:,} without a reward"
            found |= {
                "Rollouts": f"{played:,} of {tasks:,} tasks; {failed}",
                "Tokens sampled": f"{sampled or 0:,}",
            }
        if peak:
            found["Memory of the trainer"] = f"{peak:.1f} GiB at most"
        return found

    def _seconds(self) -> float:
        """From the first to the last record of each attempt."""
        times: dict[int, list[float]] = defaultdict(list)
        for step in self.run.steps:
            for record in step.records.values():
                if isinstance(record.get("time"), int | float):
                    times[int(record.get("attempt", 1))].append(float(record["time"]))
        if self.record is not None and self.record.ended is not None:
            times[self.record.attempt] += [self.record.started, self.record.ended]
        return sum(max(found) - min(found) for found in times.values())

    @property
    def provenance(self) -> dict[str, str]:
        """Versions, machine and hashes."""
        found = {"Run": self._id or "not recorded"}
        if (kept := self.run.kept_steps) and (record := self._kept(kept[-1])):
            found["Buckeye, torch"] = f"{record.get('buckeye')}, {record.get('torch')}"
            found["Trained on"] = f"{record.get('device')}, {record.get('ranks')} rank(s)"
            found[f"Weights after step {kept[-1]}"] = f"sha256 {record.get('weights')}"
        for name in ("rl.json", "sft.json"):
            path = self.run.path / "configs" / name
            if path.is_file():
                found["Settings"] = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for report in self.evaluations:
            if report.content_hash is not None:
                found[f"Content of {report.name}"] = report.content_hash
        return {**found, "Report made by": f"Buckeye {__version__}"}

    def _kept(self, step: int) -> Mapping[str, Any]:
        try:
            found = read_json(self.run.path / "trained" / f"step_{step}" / "record.json")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def config_text(self) -> str:
        return self.public(json.dumps(self.kind_and_config[1], indent=1, ensure_ascii=False))

    def public(self, text: str) -> str:
        """A text without the folders of this machine: a report is sent."""
        for path, name in ((self.run.path.absolute(), self.name), (self.run.path, self.name)):
            text = text.replace(str(path), name) if len(str(path)) > 1 else text
        return text.replace(str(Path.home()), "~")


def _picked(rows: Sequence[tuple[Any, ...]], *, first: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Rows of `_CHOICE` with why they are picked, of the first step or the last."""
    scored = sorted((row for row in rows if row[0] is not None), key=lambda row: row[0])
    found: list[tuple[str, tuple[Any, ...]]] = []
    if scored:
        median = ("the median", scored[(len(scored) - 1) // 2])
        if first:
            return [median]
        highest = next(row for row in scored if row[0] == scored[-1][0])
        found = [("the highest reward", highest), median, ("the lowest reward", scored[0])]
    odd = [row for row in rows if row[0] is None or row[4]]
    if rows and not first:
        why = "the longest that failed or was cut off" if odd else "the longest"
        found.append((why, max(odd or rows, key=lambda row: row[3] or 0)))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
