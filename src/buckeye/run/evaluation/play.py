"""Playing an evaluation: all rollouts that are not on the disk yet, some at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from buckeye.config.environments import EnvConfig
from buckeye.envs.base import GroupEnvironment, Outcome, Task
from buckeye.envs.registry import load_environment
from buckeye.errors import RunError, UsageError
from buckeye.orchestrator.environments import NamedEnvironment, short_name, tasks_of
from buckeye.orchestrator.policy import derive_seed
from buckeye.orchestrator.rollout import play_outcome
from buckeye.run.evaluation.chat_policy import ChatPolicy, ChatSampling, ChatServer
from buckeye.run.evaluation.figures import Figures, figures_of
from buckeye.run.evaluation.rows import ROLLOUTS, Row, RowFile, read_rows
from buckeye.run.gateway import gateway_here
from buckeye.run.model_files import fetch_model
from buckeye.run.serve import served_model
from buckeye.storage import read_json, write_file
from buckeye.tasks.keys import variables

SETTINGS, FIGURES, GATEWAY_LOG = "settings.json", "figures.json", "gateway.log"
_GROUPS_OF_ONE = (
    "rewards of this environment depend on the other rollouts of a task; here every rollout is scored as a "
    "group of its own (`evals` scores whole groups)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """What is evaluated, and how. Without `base_url` the model is served here, with the embedded engine.

    `split` None is `eval` where the environment has one, else `train`. `examples` None is all tasks.
    """

    env_id: str
    args: Mapping[str, Any]
    model: str
    base_url: str | None
    api_key_var: str
    split: str | None
    examples: int | None
    rollouts: int
    sampling: ChatSampling
    seed: int
    max_concurrent: int
    timeout: float
    retries: int
    pass_reward: float
    output_dir: Path
    resume: bool
    progress: Callable[[int, int], None] = field(compare=False, default=lambda done, total: None)

    def record(self, split: str) -> dict[str, Any]:
        """What makes two evaluations the same, so that one may go on where the other stopped."""
        return {
            "env": self.env_id,
            "args": dict(self.args),
            "split": split,
            "model": self.model,
            "base_url": self.base_url,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """A finished evaluation."""

    settings: Mapping[str, Any]
    figures: Figures
    output_dir: Path
    resumed: int
    notes: tuple[str, ...] = ()
    """What the figures do not say about how they came about."""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        figures = self.figures.to_json()
        return {**self.settings, **figures, "notes": list(self.notes), "output_dir": str(self.output_dir)}


def run_eval(request: EvalRequest) -> EvalReport:
    """Play what is missing and write `figures.json`. The directory then also has `settings.json` and
    `rollouts.jsonl`.

    Raises UsageError for a directory with another evaluation, or one that is there already and not resumed,
    and RunError if no rollout could be scored.
    """
    name = short_name(request.env_id)
    env = NamedEnvironment(name=name, environment=load_environment(request.env_id, **request.args))
    split = request.split or _default_split(env)
    tasks = tasks_of(env, split)
    tasks = [tasks[i] for i in range(min(len(tasks), request.examples or len(tasks)))]
    settings = request.record(split)
    _claim(request, settings)
    known = {key: row for key, row in read_rows(request.output_dir / ROLLOUTS).items() if row.error is None}
    wanted = [(task, number) for task in tasks for number in range(request.rollouts)]
    missing = [(task, number) for task, number in wanted if (task.id, number) not in known]
    resumed = len(wanted) - len(missing)
    rows = known | (_play_missing(request, env, missing, resumed) if missing else {})
    figures = figures_of(
        [rows[task.id, number] for task, number in wanted],
        each=request.rollouts,
        pass_reward=request.pass_reward,
    )
    notes = (_GROUPS_OF_ONE,) if isinstance(env.environment, GroupEnvironment) else ()
    report = EvalReport(
        settings=settings, figures=figures, output_dir=request.output_dir, resumed=resumed, notes=notes
    )
    write_file(request.output_dir / FIGURES, json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    if not figures.scored:
        first = next(iter(figures.errors), "there are no tasks")
        raise RunError(f"no rollout of {name} could be scored; the commonest error: {first}")
    return report


def _default_split(env: NamedEnvironment) -> str:
    try:
        env.environment.tasks("eval")
    except KeyError:
        return "train"
    return "eval"


def _claim(request: EvalRequest, settings: Mapping[str, Any]) -> None:
    """Take the directory for this evaluation, or go on with it."""
    path = request.output_dir / SETTINGS
    if not path.exists():
        if request.output_dir.exists() and any(request.output_dir.iterdir()):
            raise UsageError(
                f"{request.output_dir} holds something else. Name another directory with --output-dir."
            )
        write_file(path, json.dumps(settings, indent=1, ensure_ascii=False))
        return
    if not request.resume:
        raise UsageError(
            f"{request.output_dir} holds an evaluation. Go on with it by --resume, or name another directory "
            "with --output-dir."
        )
    try:
        before = read_json(path)
        now = json.loads(json.dumps(settings))
        different = [key for key in now if key != "base_url" and before.get(key) != now[key]]
    except (ValueError, AttributeError):
        raise UsageError(f"{path} cannot be read: it is no settings file of an evaluation.") from None
    if different:
        raise UsageError(
            f"{request.output_dir} holds another evaluation: {different[0]} was "
            f"{before.get(different[0])!r} and is {settings[different[0]]!r}. Name another --output-dir."
        )


def _play_missing(
    request: EvalRequest, env: NamedEnvironment, missing: Sequence[tuple[Task, int]], resumed: int
) -> dict[tuple[str, int], Row]:
    played = EnvConfig(id=request.env_id, args=dict(request.args))
    log_file = request.output_dir / GATEWAY_LOG
    with gateway_here([played], log_file, rollouts=request.max_concurrent):
        return asyncio.run(_play_all(request, env, missing, resumed))


async def _play_all(
    request: EvalRequest, env: NamedEnvironment, missing: Sequence[tuple[Task, int]], resumed: int
) -> dict[tuple[str, int], Row]:
    rows: dict[tuple[str, int], Row] = {}
    file = RowFile(request.output_dir / ROLLOUTS)
    slots = asyncio.Semaphore(request.max_concurrent)
    total = resumed + len(missing)
    request.progress(resumed, total)

    async def one(server: ChatServer, task: Task, number: int) -> None:
        async with slots:
            row = await _play(request, env, server, task, number)
        if row.error is not None and server.refusal is not None:
            raise UsageError(server.refusal)
        file.add(row)
        rows[task.id, number] = row
        request.progress(resumed + len(rows), total)

    try:
        async with _server(request) as server, asyncio.TaskGroup() as group:
            for task, number in missing:
                group.create_task(one(server, task, number))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        file.close()
    return rows


async def _play(
    request: EvalRequest, env: NamedEnvironment, server: ChatServer, task: Task, number: int
) -> Row:
    """One rollout, again after an error up to the number of retries."""
    for attempt in range(request.retries + 1):
        seed = derive_seed(request.seed, task.id, number, attempt) % 2**31
        policy = ChatPolicy(server, request.sampling.with_seed(seed))
        started = time.monotonic()

        async def rollout(policy: ChatPolicy = policy) -> Outcome:
            return await env.environment.rollout(task, policy)

        outcome = await play_outcome(rollout, request.timeout)
        row = Row(
            task_id=task.id,
            rollout=number,
            reward=outcome.reward,
            error=outcome.error,
            stop_reason=outcome.stop_reason,
            truncated=policy.truncated,
            components=dict(outcome.components),
            turns=policy.turns,
            prompt_tokens=policy.prompt_tokens,
            completion_tokens=policy.completion_tokens,
            seconds=round(time.monotonic() - started, 3),
            data=dict(task.data),
            messages=list(policy.messages),
        )
        if row.error is None or server.refusal is not None:
            break
    return row


@asynccontextmanager
async def _server(request: EvalRequest) -> AsyncIterator[ChatServer]:
    """The model: behind `base_url`, or served here for as long as the block lasts."""
    timeout = httpx.Timeout(30.0, read=request.timeout)
    limits = httpx.Limits(max_connections=request.max_concurrent)
    if request.base_url is not None:
        key = variables().get(request.api_key_var)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base_url = request.base_url.rstrip("/")
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
            yield ChatServer(base_url=base_url, model=request.model, client=client)
        return
    async with served_model(fetch_model(request.model)) as served:
        headers = {"Authorization": f"Bearer {served.api_key}"}
        async with httpx.AsyncClient(
            timeout=timeout, limits=limits, headers=headers, trust_env=False
        ) as client:
            yield ChatServer(base_url=served.base_url, model=served.model, client=client)
