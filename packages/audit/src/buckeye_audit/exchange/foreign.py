"""Result folders of `verifiers` (`results.jsonl`) and of prime-rl (`train_rollouts.jsonl` and
`eval_rollouts.jsonl` in `rollouts/step_N`).

A line is what an evaluation of `verifiers` saves (`prompt`, `completion`, `reward`), or a trace of its
version 1 (`nodes`, `rewards`). Lines are read one at a time.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import msgspec

from buckeye.base.json_lines import parse_json_lines
from buckeye.base.storage import read_json, step_directories, write_file
from buckeye.monitor.conversation import as_text
from buckeye.monitor.intervals import mean_over_tasks
from buckeye.monitor.rollouts import ROLLOUTS_FOLDER, PlayedRollout, rollouts_file
from buckeye.runs.checkpoint_facts import public_name
from buckeye_audit.exchange.played import ROW, Played, file_name, without_secrets

_FILES = {"train": "train_rollouts.jsonl", "eval": "eval_rollouts.jsonl"}
_LONGEST_LINE = 64_000_000  # bytes; a longer one is no rollout


@dataclass(frozen=True, slots=True)
class ForeignFolder:
    """What another trainer has left in a directory."""

    path: Path
    unreadable: list[str] = field(default_factory=list)
    _put: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def model(self) -> str:
        return public_name(str(self._metadata.get("model") or "unknown"))

    @property
    def _metadata(self) -> Mapping[str, Any]:
        try:
            found = read_json(self.path / "metadata.json")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def files(self) -> Iterator[tuple[str, int, Path]]:
        """Split, step and path of every file of rollouts, training first."""
        if (self.path / "results.jsonl").is_file():
            yield "eval", 0, self.path / "results.jsonl"
        steps = step_directories(self.path / "rollouts")
        for split, name in _FILES.items():
            yield from ((split, step, path / name) for step, path in steps.items() if (path / name).is_file())

    @property
    def kind(self) -> str:
        """Whose it is."""
        return "verifiers" if (self.path / "results.jsonl").is_file() else "prime-rl"

    def played(self, splits: Sequence[str], steps: range | None) -> Iterator[Played]:
        """Those of some splits and steps, in order of steps and environments."""
        for split, step, path in self.files():
            if split in splits and (steps is None or step in steps):
                yield from (_played(split, step, one) for one in self._read(path))

    def put(self, run: Path) -> None:
        """Write what is new since the last time into the directory of a run: rollouts and evaluations, and of
        each step's batch and of each evaluation what it earned."""
        (run / ROLLOUTS_FOLDER).mkdir(parents=True, exist_ok=True)
        for split, step, path in self.files():
            stamp = (path.stat().st_mtime_ns, path.stat().st_size)
            if self._put.get(path) != stamp:
                (_put_batch if split == "train" else _put_evaluations)(run, step, self._read(path))
                self._put[path] = stamp

    def _read(self, path: Path) -> Iterator[PlayedRollout]:
        """The rollouts in a file in order of their environments, for which it is read twice."""
        env = str(self._metadata.get("env_id") or "")
        groups: dict[str, int] = {}
        numbers: Counter[int] = Counter()
        places, wrong = list[tuple[str, int, int, int]](), 0
        with path.open("rb") as file:
            for at, line in _lines(file):
                try:
                    values = _values(line)
                    group = groups.setdefault(f"{values['env']}/{values['task_id']}", len(groups))
                    msgspec.convert({"group": group, **values}, PlayedRollout)
                except _NO_ROLLOUT:
                    wrong += bool(line.strip())
                    continue
                places.append((values["env"] or env, at, group, numbers[group]))
                numbers[group] += 1
            for name, at, group, number in sorted(places):
                file.seek(at)
                values = _values(file.readline(_LONGEST_LINE))
                yield msgspec.convert(
                    {**values, "group": group, "number": number, "env": name}, PlayedRollout
                )
        told = f"{path.relative_to(self.path)}: {wrong} lines that are no rollouts"
        if wrong and told not in self.unreadable:
            self.unreadable.append(told)


_NO_ROLLOUT = (AttributeError, IndexError, KeyError, TypeError, msgspec.ValidationError)


def foreign_folder(path: Path) -> ForeignFolder | None:
    """The results of another trainer in a directory, if that is what it holds."""
    folder = ForeignFolder(path)
    return None if next(folder.files(), None) is None else folder


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Every line with its place; of one that is too long its beginning, which is no JSON."""
    at = 0
    while line := file.readline(_LONGEST_LINE):
        yield at, line
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE)
        at = file.tell()


def _values(line: bytes) -> dict[str, Any]:
    """What a line says of a rollout. Raises one of `_NO_ROLLOUT`."""
    record = next(parse_json_lines([line]), {})
    return _of_trace(record) if "nodes" in record else _of_output(record)


def _put_batch(run: Path, step: int, rollouts: Iterator[PlayedRollout]) -> None:
    rewards, cut = list[float](), list[bool]()
    with (run / ROLLOUTS_FOLDER / rollouts_file(step)).open("wb") as file:
        for one in rollouts:
            file.write(msgspec.json.encode(one) + b"\n")
            rewards += [one.reward] if one.reward is not None else []
            cut.append(one.truncated)
    values = {"reward/mean": fmean(rewards)} if rewards else {}
    values |= {"is_truncated/mean": fmean(cut)} if cut else {}
    record = {"time": time.time(), "attempt": 1, "process": "orchestrator", "step": step, **values}
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def _put_evaluations(run: Path, step: int, rollouts: Iterator[PlayedRollout]) -> None:
    taken = set[str]()
    for env, of_it in groupby(rollouts, key=lambda one: one.env):
        folder, errored = run / "evals" / f"step_{step}", 0
        folder.mkdir(parents=True, exist_ok=True)
        name = file_name(env or "results", taken)
        tasks: dict[str, list[float]] = defaultdict(list)
        with (folder / f"{name}.jsonl").open("wb") as file:
            for one in of_it:
                file.write(msgspec.json.encode({**msgspec.to_builtins(one), "data": {}}) + b"\n")
                errored += one.reward is None
                if one.reward is not None:
                    tasks[one.task_id].append(one.reward)
        write_file(folder / f"{name}.json", msgspec.json.encode(_earned(tasks, errored) | {"step": step}))


def _earned(tasks: Mapping[str, Sequence[float]], errored: int) -> dict[str, Any]:
    """The figures of an evaluation."""
    known: dict[str, Any] = {"n": sum(map(len, tasks.values())), "errored": errored, "mean_reward": None}
    if tasks:
        passed = mean_over_tasks([fmean(r >= 1.0 for r in of_it) for of_it in tasks.values()], list(tasks))
        known |= {"mean_reward": fmean(map(fmean, tasks.values())), "exact": passed.value}
        known |= {"ci95": (passed.low, passed.high)}
    return known


def _played(split: str, step: int, rollout: PlayedRollout) -> Played:
    values = msgspec.to_builtins(rollout)
    row: dict[str, Any] = {name: values.get(name) for name in ROW}
    row |= {"split": split, "step": step, "task": rollout.task_id, "text": None, "prompt": None}
    row["components"] = json.dumps(rollout.components)
    return without_secrets({**row, "advantage": None}, rollout)


def _of_output(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a line of `results.jsonl`. One that failed has a reward of 0 there, which it did not earn."""
    error = record.get("error")
    failed = error.get("error_chain_str") or error.get("error") if isinstance(error, dict) else error
    return {
        "task_id": str(record["example_id"]),
        "env": str(record.get("task") or record.get("env_id") or ""),
        "reward": None if failed else record["reward"],
        "error": str(failed) if failed else None,
        "components": _numbers(record.get("metrics")),
        "stop_reason": record.get("stop_condition"),
        "truncated": bool(record.get("is_truncated")),
        "completion_tokens": int((record.get("token_usage") or {}).get("output_tokens") or 0),
        "messages": [*_messages(record.get("prompt")), *_messages(record.get("completion"))],
    }


def _of_trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a trace: the messages on the way to its last node."""
    nodes, path = record["nodes"], list[dict[str, Any]]()
    at = len(nodes) - 1 if nodes else None
    while at is not None and len(path) <= len(nodes):
        path.append(nodes[at]["message"])
        at = nodes[at].get("parent")
    rewards = record.get("rewards") or {}
    scores = [r["score"] * r.get("weight", 1.0) for r in rewards.values() if isinstance(r, dict)]
    errors = [f"{one.get('type')}: {one.get('message')}" for one in record.get("errors") or []]
    failed = not record.get("ok", not errors)
    task = record.get("task") or {}
    return {
        "task_id": str(task.get("key") or task.get("hash") or task.get("data")),
        "env": str(((record.get("info") or {}).get("prime_rl") or {}).get("env_name") or ""),
        "reward": sum(scores) if scores and not failed else None,
        "error": (errors[-1] if errors else "it did not end well") if failed else None,
        "components": _numbers({name: (r or {}).get("score") for name, r in rewards.items()}),
        "stop_reason": record.get("stop_condition"),
        "messages": path[::-1],
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, list):
        return [message for message in given if isinstance(message, dict)]
    return [{"role": "text", "content": as_text(given)}] if given else []


def _numbers(given: Any) -> dict[str, float]:
    found = given.items() if isinstance(given, dict) else ()
    return {str(name): float(value) for name, value in found if isinstance(value, int | float)}
