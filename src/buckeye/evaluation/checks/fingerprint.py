"""Fingerprints of tasks: they show whether another process, with another hash seed, makes equal tasks.

`python -m buckeye.evaluation.checks.fingerprint` reads `{"id", "args", "splits", "seed", "variables"}` from
standard input and prints the fingerprint as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.base.process import PYTHON
from buckeye.base.storage import utf8
from buckeye.envs.base import Environment, Task, required_tasks
from buckeye.envs.settings import with_variables
from buckeye.evaluation.checks.samples import scan_order
from buckeye.evaluation.checks.task_text import accepted_answers
from buckeye.workers.loading import open_environment

_COMPARED = 300

Fingerprint = dict[str, list[list[str]]]
"""Entries by split: ["size", number of tasks], then [task id, hash of messages and answers] of some tasks."""


def fingerprint(environment: Environment, splits: Sequence[str], seed: int) -> Fingerprint:
    """Return the fingerprint of up to `_COMPARED` tasks of every split, chosen by `seed`."""
    prints: Fingerprint = {}
    for name in splits:
        tasks = required_tasks(environment, name)
        order = scan_order(name, len(tasks), seed)[:_COMPARED]
        prints[name] = [["size", str(len(tasks))], *(_task_print(tasks[index]) for index in order)]
    return prints


def fingerprint_in_new_process(
    env_id: str,
    args: Mapping[str, Any],
    splits: Sequence[str],
    seed: int,
    seconds: float,
    variables: Sequence[str],
) -> Fingerprint | str | None:
    """Return the fingerprint that a new process with `variables` computes.

    Return None if the process takes more than `seconds`, and the reason as text if it fails.
    """
    request = json.dumps(
        {
            "id": env_id,
            "args": dict(args),
            "splits": list(splits),
            "seed": seed,
            "variables": list(variables),
        }
    )
    hash_seed = os.environ.get("PYTHONHASHSEED")
    try:
        process = subprocess.run(  # noqa: S603, an argument list without a shell
            [*PYTHON, "-m", "buckeye.evaluation.checks.fingerprint"],
            input=request,
            env={**os.environ, "PYTHONHASHSEED": "2" if hash_seed == "1" else "1"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return f"the second process failed: {last}"
    try:  # the environment may print lines before the result, or end the process without it
        result: Fingerprint = json.loads((process.stdout.splitlines() or [""])[-1])
    except ValueError:
        return "the second process ended without a result"
    return result


def first_difference(first: Fingerprint, second: Fingerprint) -> str | None:
    """Return a description of the first difference, or None if the fingerprints are equal."""
    for split, entries in first.items():
        for entry, other in zip(entries, second[split], strict=False):
            if entry == other:
                continue
            if entry[0] != other[0]:
                return f"{split}: {entry[0]} the first time, {other[0]} the second time"
            if entry[0] == "size":
                return f"{split}: {entry[1]} tasks the first time, {other[1]} the second time"
            return f"{split}: {entry[0]} has different messages or answers"
    return None


def _task_print(task: Task) -> list[str]:
    shown = [[dict(message) for message in task.messages], sorted(accepted_answers(task))]
    text = json.dumps(shown, sort_keys=True, ensure_ascii=False, default=repr)
    return [task.id, hashlib.sha256(utf8(text)).hexdigest()[:16]]


def _main() -> None:
    request = json.load(sys.stdin)
    environment = open_environment(request["id"], request["args"], with_variables(request["variables"]))
    result = json.dumps(fingerprint(environment, request["splits"], request["seed"]))
    print(f"\n{result}", flush=True)
    os.dup2(2, 1)  # the result stays the last line, also if the environment prints at its end


if __name__ == "__main__":
    _main()
