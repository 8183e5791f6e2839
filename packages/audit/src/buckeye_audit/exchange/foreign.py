"""Result folders of `verifiers` (`results.jsonl`) and of prime-rl (`train_rollouts.jsonl` and
`eval_rollouts.jsonl` in `rollouts/step_N`).

A line is what an evaluation of `verifiers` saves (`prompt`, `completion`, `reward`), or a trace of its
version 1 (`nodes`, `rewards`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.json_lines import parse_json_lines
from buckeye.base.storage import read_json, step_directories
from buckeye.monitor.rollouts import PlayedRollout
from buckeye.runs.checkpoint_facts import public_name
from buckeye_audit.conversation import as_text
from buckeye_audit.exchange.played import ROW, Played, without_secrets

_FILES = {"train": "train_rollouts.jsonl", "eval": "eval_rollouts.jsonl"}


@dataclass(frozen=True, slots=True)
class ForeignFolder:
    """What another trainer has left in a directory."""

    path: Path
    unreadable: list[str] = field(default_factory=list)

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

    def played(self, splits: Sequence[str], steps: range | None) -> Iterator[Played]:
        """Those of some splits and steps, in order of steps and environments."""
        env = str(self._metadata.get("env_id") or "")
        for split, step, path in self.files():
            if split in splits and (steps is None or step in steps):
                found = sorted(self._read(path, env), key=lambda one: one.env)
                yield from (_played(split, step, one) for one in found)

    def _read(self, path: Path, env: str) -> Iterator[PlayedRollout]:
        groups: dict[str, int] = {}
        numbers: Counter[int] = Counter()
        lines = path.read_bytes().splitlines()
        records = list(parse_json_lines(lines))
        wrong = sum(bool(line.strip()) for line in lines) - len(records)
        for record in records:
            try:
                values = _of_trace(record) if "nodes" in record else _of_output(record)
                group = groups.setdefault(f"{values['env']}/{values['task_id']}", len(groups))
                one = {"group": group, "number": numbers[group], **values, "env": values["env"] or env}
                yield msgspec.convert(one, PlayedRollout)
                numbers[group] += 1
            except (AttributeError, IndexError, KeyError, TypeError, msgspec.ValidationError):
                wrong += 1
        if wrong:
            self.unreadable.append(f"{path.relative_to(self.path)}: {wrong} lines that are no rollouts")


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
