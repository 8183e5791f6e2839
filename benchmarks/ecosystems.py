"""Train on published environments of many libraries, unmodified, and compare their rewards.

    python -m benchmarks.ecosystems [NAME ...]   # rows of ecosystems.toml; known results are kept
    python -m benchmarks.ecosystems --table      # print the table of the results again

Each environment runs in the pinned interpreter of its library (`.cache/venvs`). A tiny model trains on it for
five steps, with an entropy bonus, so that the weights change also where all rewards are equal. Every sampled
token must be trained once, with its log-prob at sampling and the version that sampled it. A forward pass of
Transformers with the weights of that version (first and last step) must give the same log-prob.

Then 50 sessions with recorded replies (texts of the row, accepted answers, moves that the messages show,
random calls of tools) are scored here and by the library's own runner (`certify/home_runner.py`). Results go
to results/ecosystems.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.workers.adapters.venvs import CACHE, python_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import published_servers
from buckeye.base.json_lines import read_json_lines
from buckeye.base.storage import read_json, write_file
from buckeye.envs.base import Message, Reply, Tool
from buckeye.envs.settings import WorkerSettings
from buckeye.evaluation.certify.parity import TOLERANCE, Home, home_rewards
from buckeye.evaluation.certify.sessions import PLANNED_TASKS, Plan, PlannedPolicy, Session, run_session
from buckeye.evaluation.checks.task_text import (
    accepted_answers,
    answer_formats,
    apply_format,
    prompt_of,
)
from buckeye.evaluation.env_play.random_policy import make_call_reply
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.transport.batches import read_trained_batch
from buckeye.workers.environment import open_worker_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "ecosystems.json"
STEPS, BATCH, GROUP, SESSIONS, AT_ONCE, TOGETHER = 5, 8, 4, 50, 8, 12
TRAIN_SECONDS = 900.0
MAX_ERROR = 1e-3
"""Limit on the difference of log-probs at sampling and in a forward pass, both in float32."""


class RecordedReplies(PlannedPolicy):
    """Policy with random texts and calls of lists, shown moves, and random calls of tools."""

    def __init__(self, plan: Plan, replies: Sequence[str], calls: Sequence[Message]) -> None:
        super().__init__(plan)
        self._said, self._known = replies, calls

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return a known call, or what the planned policy would reply."""
        if not tools or not self._known or self._rng.random() < 0.4:
            return await super().chat(messages, tools=() if self._rng.random() < 0.2 else tools)
        call = self._rng.choice(self._known)
        self.replies.append((reply := make_call_reply(call["name"], call["arguments"], form="")).message)
        return reply

    def _text_reply(self, messages: Sequence[Message]) -> Reply:
        shown = self._move("\n".join(str(message.get("content")) for message in messages))
        text = self._rng.choice([*self._said, self.plan.first, shown])
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})


def main() -> None:
    """Train on and compare all environments without a result, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="environments to run again; default: those without a result")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    rows = table_rows()
    known = read_results()
    names = given.names or [name for name in rows if "error" in known.get(name, {"error": ""})]
    for _, group in itertools.groupby([] if given.table else names, lambda name: rows[name]["ecosystem"]):
        for chunk in chunks(list(group)):
            run_rows({name: rows[name] for name in chunk})
    results = read_results()
    print(table({name: results[name] for name in rows if name in results}))


def chunks(names: Sequence[str]) -> list[Sequence[str]]:
    """Return names in parts of at most TOGETHER."""
    return [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]


def read_results() -> dict[str, Any]:
    """Return the results by the name of the environment."""
    return read_json(RESULTS) if RESULTS.exists() else {}


def write_result(name: str, row: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write the result of one environment. Results are in the order of the table."""
    noted = {key: row[key] for key in ("ecosystem", "note") if key in row}
    print(name, json.dumps(result), file=sys.stderr, flush=True)
    results = {**read_results(), name: noted | dict(result)}
    ordered = {key: results[key] for key in table_rows() if key in results}
    write_file(RESULTS, json.dumps(ordered, indent=1) + "\n")


def run_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Train on environments of one library in one run, and compare the rewards of each.

    If the run fails, its halves run separately, so that the result of one environment does not depend on the
    others.
    """
    started = time.monotonic()
    print(f"training: {', '.join(rows)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="ecosystems-") as temporary:
        folder = Path(temporary)
        os.environ["HOME"], os.environ["UV_CACHE_DIR"] = str(folder), str(CACHE.parent / "uv")
        try:
            opened = {
                name: environment_of(row, folder / f"{number}.jsonl")
                for number, (name, row) in enumerate(rows.items())
            }
            trained = train(opened, folder)
        except Exception as error:  # one environment must not end the others
            if len(rows) == 1:
                write_result(*next(iter(rows.items())), {"error": f"{type(error).__name__}: {error}"[-900:]})
                return
            half = list(rows)[: len(rows) // 2]
            run_rows({name: rows[name] for name in half})
            run_rows({name: row for name, row in rows.items() if name not in half})
            return
        seconds = (time.monotonic() - started) / len(rows)
        for name, environment in opened.items():
            started = time.monotonic()
            try:
                result = {
                    "version": environment.version or installed_version(environment, rows[name]["package"])
                }
                result |= {"trained": trained[name], "parity": parity(rows[name], environment)}
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[-900:]}
            result["seconds"] = round(seconds + time.monotonic() - started)
            write_result(name, rows[name], result)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Values of an `[[env]]` table. Without `python`, it runs in Buckeye's interpreter.

    `variables` are names of environment variables, which are set in this process. A server that allows one
    session at a time needs BATCH `workers`.
    """

    id: str
    args: Mapping[str, Any]
    python: Path | None
    max_turns: int
    variables: tuple[str, ...] = ("UV_CACHE_DIR",)
    version: str | None = None
    workers: int = 1


def environment_of(row: Mapping[str, Any], tasks: Path) -> Opened:
    """Return the environment of a row, and write its tasks."""
    args, turns = {key: place(value) for key, value in row["args"].items()}, row.get("max_turns", 4)
    if "server" in row:
        files, version = mcp_files(row["server"])
        return Opened(id=row["id"], args=args | files, python=None, max_turns=turns, version=version)
    if "tasks" in row:
        tasks.write_text("".join(json.dumps(task) + "\n" for task in row["tasks"]))
        args["tasks"] = str(tasks)
    variables = {name: place(value) for name, value in row.get("variables", {}).items()}
    os.environ.update(variables)
    python, names = python_of(row["venv"]), ("UV_CACHE_DIR", *variables)
    return Opened(
        id=place(row["id"]),
        args=args,
        python=python,
        max_turns=turns,
        variables=names,
        workers=row.get("workers", 1),
    )


def mcp_files(name: str) -> tuple[dict[str, str], str]:
    """Install a published MCP server, run `rl init`, and return the environment's files and the version."""
    server, folder = published_servers.SERVERS[name], CACHE.parent / "servers" / name
    folder.mkdir(parents=True, exist_ok=True)
    programs, version = published_servers.install(server, folder)
    published_servers.init(server, programs, folder)
    files = {"dataset": str(folder / "tasks.json"), "config_path": str(folder / "configs" / "env.yaml")}
    return files, f"{server.packages[0]} {version}"


def table_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of ecosystems.toml by name; each row has the values of its ecosystem."""
    ecosystems = tomllib.loads((HERE / "ecosystems.toml").read_text("utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for ecosystem, shared in ecosystems.items():
        for row in shared.pop("environments"):
            merged = {**shared, **row, "args": {**shared.get("args", {}), **row.get("args", {})}}
            rows[row.get("name", row["id"])] = {"ecosystem": ecosystem, **merged}
    return rows


def place(value: Any) -> Any:
    """Return a value with the folder of the repository in place of `{root}`."""
    if isinstance(value, list):
        return [place(item) for item in value]
    return value.replace("{root}", str(ROOT)) if isinstance(value, str) else value


def installed_version(environment: Opened, package: str) -> str:
    """Return the package and its version in the interpreter of an environment."""
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    argv = [environment.python or sys.executable, "-c", code, package]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return f"{package} {done.stdout.strip()}"


def tiny_model(folder: Path) -> Path:
    """Make a model of one layer, whose tokenizer is trained on the documentation."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    size = TinySize(vocab_size=1500, layers=1, hidden=64, max_length=8192)
    make_tiny_model(folder / "model", texts=texts, size=size, seed=0)
    return folder / "model"


def toml_table(head: str, values: Mapping[str, Any]) -> str:
    """Return a table of TOML. JSON values without null are valid, but for objects."""
    return "\n".join([head, *(f"{key} = {inline(value)}" for key, value in values.items())])


def inline(value: Any) -> str:
    """Return a value of TOML on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def train(environments: Mapping[str, Opened], folder: Path) -> dict[str, dict[str, Any]]:
    """Run `rl` for five steps, check all batches, and return figures. Raise `AssertionError`.

    Each environment has the same number of groups in each step.
    """
    model, output, count = tiny_model(folder), folder / "out", len(environments)
    batch = BATCH * count
    settings = {"batch_size": batch, "rollouts_per_example": GROUP, "seq_len": 8192, "max_steps": STEPS}
    tables = [toml_table("", settings), toml_table("[sampling]", {"max_tokens": 8})]
    for name, environment in environments.items():
        values: dict[str, Any] = {"name": name, "id": environment.id, "max_turns": environment.max_turns}
        if environment.python is not None:
            values |= {
                "python": str(environment.python),
                "isolation": "process",
                "variables": list(environment.variables),
                "workers": environment.workers,
            }
        tables += [toml_table("[[env]]", values), toml_table("[env.args]", environment.args)]
    (folder / "orch.toml").write_text("\n".join(tables) + "\n")
    argv = [sys.executable, "-m", "buckeye", "rl", "--model.name", model, "--max-async-level", 0]
    argv += ["--orchestrator", "@", folder / "orch.toml", "--trainer.optim.lr", "1e-2", "--inference", "{}"]
    argv += ["--trainer.loss.entropy-coef", "0.01", "--max-steps", STEPS, "--output-dir", output]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    output_of = {"capture_output": True, "text": True, "timeout": TRAIN_SECONDS, "check": False}
    done = subprocess.run([*map(str, argv)], cwd=folder, env=environ, **output_of)
    assert done.returncode == 0, done.stdout[-800:] + done.stderr[-800:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    figures = {name: Counter[str]() for name in environments}
    for step in range(STEPS):
        rollouts = list(read_json_lines(output / "rollouts" / f"step_{step}.jsonl"))
        samples = read_trained_batch(output / "trained", step)[0].samples
        check_batch(rollouts, samples, tokenizer, step)
        for name, counts in figures.items():
            own = [rollout for rollout in rollouts if rollout["env"] == name]
            assert [rollout["error"] for rollout in own] == [None] * BATCH, f"{name}: {own}"[:900]
            counts.update(rollouts=len(own), samples=sum(len(rollout["text"]) for rollout in own))
            counts.update(turns=sum(rollout["turns"] for rollout in own))
            counts.update(sampled_tokens=sum(rollout["completion_tokens"] for rollout in own))
    first, last = (read_trained_batch(output / "trained", step)[0].samples for step in (0, STEPS - 1))
    error = max(largest_error(model, first), largest_error(output / "weights" / f"step_{STEPS - 1}", last))
    assert error < MAX_ERROR, f"log-probs differ by {error}"
    old = largest_error(model, last)
    assert old > MAX_ERROR, "the weights did not change"
    shared = {"logprob_error": float(f"{error:.2g}"), "of_old_weights": float(f"{old:.2g}")}
    return {name: {**counts, **shared} for name, counts in figures.items()}


def largest_error(weights: Path, samples: Sequence[Any]) -> float:
    """Return the largest difference of recorded log-probs and those of a model of Transformers."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    errors = [0.0]
    for sample in samples:
        ids = torch.tensor(np.asarray(sample.token_ids), dtype=torch.long)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
        errors.append(float(np.abs(found - sample.logprobs[1:])[sample.loss_mask[1:]].max()))
    return max(errors)


def check_batch(
    rollouts: Sequence[Mapping[str, Any]], samples: Sequence[Any], tokenizer: Any, step: int
) -> None:
    """Assert that each token that the policy sampled is trained once, and that all others are context."""
    for sample in samples:
        mask = sample.loss_mask
        assert not mask[0]
        assert (sample.logprobs[~mask] == 0).all()
        assert (sample.versions[~mask] == -1).all()
        assert set(np.unique(sample.versions[mask])) <= {step}, f"versions {np.unique(sample.versions)}"
        assert (sample.logprobs[mask] <= 0).all()
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert trained == sum(rollout["completion_tokens"] for rollout in rollouts)
    texts = Counter(tokenizer.decode(sample.token_ids) for sample in samples)
    assert texts == Counter(text for rollout in rollouts for text in rollout["text"])
    for rollout in rollouts:
        assert rollout["turns"] == 1 + rollout["turns_extended"] + rollout["turns_branched"]
        assert len(rollout["text"]) == 1 + rollout["turns_branched"]


def parity(row: Mapping[str, Any], environment: Opened) -> dict[str, Any]:
    """Return how many rewards of recorded replies equal those of the library."""
    if environment.python is None:
        return {"no_home": row["no_home"]}
    sessions = recorded_sessions(row, environment)
    scored = [session for session in sessions if session.outcome.reward is not None]
    errors = [s.outcome.error for s in sessions if s.outcome.reward is None]
    assert len(scored) >= len(errors), f"{len(errors)} sessions have no reward: {errors[0]}"
    path, name = Path(environment.id), environment.id.partition("/")[2]
    home = Home(
        python=environment.python,
        runner=row.get("runner", row["ecosystem"]),
        name=row.get("module", path.stem if path.is_file() else name),
        path=[str(path.parent)] if path.is_file() else [],
    )
    rewards = home_rewards(home, environment.args, scored)
    pairs = [(float(s.outcome.reward or 0.0), reward) for s, reward in zip(scored, rewards, strict=True)]
    ended = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    assert ended, "the library gives no reward for any session"
    differ = [pair for pair in ended if abs(pair[0] - pair[1]) > TOLERANCE]
    return {
        "sessions": len(sessions),
        "replies": sum(len(session.replies) for session in sessions),
        "equal": len(ended) - len(differ),
        "differ": differ,
        "not_ended": len(pairs) - len(ended),
        "errors": len(errors),
        **({"first_error": str(errors[0])[:200]} if errors else {}),
        "distinct_rewards": len({round(theirs, 6) for _, theirs in ended}),
    }


def recorded_sessions(row: Mapping[str, Any], opened: Opened) -> list[Session]:
    """Run sessions whose replies are texts of the row, accepted answers, shown moves and random calls."""
    turns = row.get("parity_turns", 30)
    settings = WorkerSettings(python=opened.python, max_turns=turns, variables=opened.variables)
    environment = open_worker_environment(opened.id, opened.args, opened.python, settings)
    tasks = environment.tasks("train")[:PLANNED_TASKS]
    form = row.get("form") or next(iter(answer_formats(map(prompt_of, tasks))), None)
    answers = [next(iter(accepted_answers(task)), "") for task in tasks]
    rng, policies = random.Random(0), []
    for number in range(SESSIONS):
        index = number % len(tasks)
        answer = answers[index] if rng.random() < 0.5 else rng.choice(answers)
        said = [*map(str, row.get("replies", [])), "", *([apply_format(form, answer)] * 3 if answer else [])]
        plan = Plan(tasks[index], rng.choice(said), number)
        policies.append(RecordedReplies(plan, said, row.get("calls", [])))
    slots = asyncio.Semaphore(AT_ONCE)

    async def run(policy: RecordedReplies) -> Session:
        async with slots:
            return await run_session(environment, policy, TRAIN_SECONDS)

    async def run_all() -> list[Session]:
        try:
            return await asyncio.gather(*map(run, policies))
        finally:
            await environment.close()

    return asyncio.run(run_all())


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results by library as a table of Markdown, and the environments without a result."""
    header = ("library", "environments", "turns", "tokens", "rewards equal", "differ", "no reward", "values")
    lines = [f"| {' | '.join(header)} |", "|---|---|---:|---:|---:|---:|---:|---|"]
    good = {name: result for name, result in results.items() if "error" not in result}
    for ecosystem, group in itertools.groupby(good.items(), lambda item: item[1]["ecosystem"]):
        rows = dict(group)
        versions = sorted({row["version"] for row in rows.values()})
        shown = [name.partition("/")[2] if name.startswith(f"{ecosystem}/") else name for name in rows]
        compared = [row["parity"] for row in rows.values()]
        values = [str(one.get("distinct_rewards", "-")) for one in compared]
        cells = [f"{ecosystem} ({', '.join(versions)})", ", ".join(f"`{name}`" for name in shown)]
        for key in ("turns", "sampled_tokens"):
            cells.append(f"{sum(row['trained'][key] for row in rows.values()):,}")
        cells.append(f"{sum(one.get('equal', 0) for one in compared):,}")
        cells.append(str(sum(len(one.get("differ", ())) for one in compared)))
        cells.append(str(sum(one.get("not_ended", 0) + one.get("errors", 0) for one in compared)))
        lines.append(f"| {' | '.join([*cells, ', '.join(values)])} |")
    failed = [f"{name}: {result['error'][-300:]}" for name, result in results.items() if "error" in result]
    return "\n".join([*lines, "", f"{len(good)} environments", *failed])


if __name__ == "__main__":
    main()
