"""Checks of a run's tasks: environments load, splits have tasks, and prompts leave room for a reply."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buckeye.base.process import die_with_parent
from buckeye.config.environments import EnvConfig
from buckeye.config.rl import RLConfig
from buckeye.envs.base import TRAIN, Environment, Task, Tool
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import BuckeyeError
from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.template import PROBE_TOOLS, ChatTemplate
from buckeye.inference.render.template_files import read_template
from buckeye.launch.preflight.check import Check, failed, ok, warning
from buckeye.orchestrator.environments import (
    NamedEnvironment,
    choose_evaluation_split,
    default_environment_name,
    environment_names,
    get_first_prompts,
    load_split,
    prompt_lengths,
    worker_settings,
)
from buckeye.workers.loading import open_environment, open_in_process

Open = Callable[[str, Mapping[str, Any], WorkerSettings], Environment | None]

_CPU_SECONDS = 1  # processor time for these checks at a start
_SECONDS = 10.0


def check_tasks(
    config: RLConfig, model_path: Path | None, *, open_one: Open = open_environment
) -> Iterator[Check]:
    """Yield one check per environment of training and of evaluation.

    Prompts are counted with the tokenizer of the model, if it is on this machine. Environments that
    `open_one` does not open are skipped.
    """
    try:
        renderer = ChatRenderer(model_path) if model_path is not None else None
    except BuckeyeError as error:
        yield failed("tokenizer", str(error), "")
        renderer = None
    template = renderer.template if renderer is not None else None
    yield from _check_named(config, open_one, template, renderer)


def _check_named(
    config: RLConfig, open_one: Open, template: ChatTemplate | None, renderer: ChatRenderer | None
) -> Iterator[Check]:
    try:
        named = list(_named(config))
    except BuckeyeError as error:
        yield failed("environments", str(error), "")
        return
    for title, one, name, split in named:
        try:
            found = _find(one, name, split, open_one)
        except BuckeyeError as error:
            yield failed(title, str(error), "")
        except Exception as error:  # an error in the environment's own code
            yield failed(title, f"{type(error).__name__}: {error}", f"buckeye env check {one.id}")
        else:
            if found is not None:
                environment, split, tasks = found
                tools = PROBE_TOOLS if getattr(environment, "offers_tools", False) else ()
                refused = _refused_prompts(title, tasks, template, tools) if template is not None else None
                yield refused or _count_prompts(title, split, tasks, renderer, config.orchestrator.seq_len)


def task_check_name(one: EnvConfig) -> str:
    """Return the name of the check of an environment's training tasks."""
    return f"tasks of {one.name or default_environment_name(one.id)}"


def check_tasks_quickly(config: RLConfig, model_path: Path | None = None) -> list[Check]:
    """Return the checks of `check_tasks` that finish within one second of processor time.

    They use no workers and no tokenizer. The other checks are left out. They run in a child process, so that
    no environment stays loaded in this one.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _look(config, model_path, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        lines = _read(reading, time.monotonic() + _SECONDS).splitlines(keepends=True)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [Check(**json.loads(line)) for line in lines if line.endswith(b"\n")]


def _look(config: RLConfig, model_path: Path | None, writing: int) -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    template = read_template(model_path) if model_path is not None else None
    for check in _check_named(config, open_in_process, template, None):
        os.write(writing, json.dumps(asdict(check)).encode() + b"\n")


def _read(reading: int, deadline: float) -> bytes:
    data = b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        data += piece
    return data


def _named(config: RLConfig) -> Iterator[tuple[str, EnvConfig, str, str | None]]:
    """Yield the title of the check, the settings, the name, and the split to use.

    A split of None means the default of `choose_evaluation_split`. Raises the errors of `environment_names`.
    """
    evaluated = config.orchestrator.evaluation_environments
    for name, one in zip(environment_names(config.orchestrator.env), config.orchestrator.env, strict=True):
        yield task_check_name(one), one, name, TRAIN
    for name, measured in zip(environment_names(evaluated), evaluated, strict=True):
        yield f"{task_check_name(measured)} to evaluate", measured, name, measured.split


def _find(
    one: EnvConfig, name: str, split: str | None, open_one: Open
) -> tuple[Environment, str, Sequence[Task]] | None:
    opened = open_one(one.id, one.args, worker_settings(one, name, one.rollout_timeout or 600.0, None))
    if opened is None:
        return None
    environment = NamedEnvironment(name=name, environment=opened)
    played = choose_evaluation_split(environment, split)
    return opened, played, load_split(environment, played)


def _refused_prompts(
    title: str, tasks: Sequence[Task], template: ChatTemplate, tools: Sequence[Tool]
) -> Check | None:
    """Return a check that reports first prompts which the chat template rejects, or None."""
    refusals = [template.find_problem(messages, tools) for messages in get_first_prompts(tasks)]
    refused = [refusal for refusal in refusals if refusal is not None]
    if not refused:
        return None
    seen = f"{len(refused)} of {len(refusals)} first prompts are refused: {refused[0]}"
    do = "change these prompts (a system message?), or chat_template.jinja of the model, or the model"
    if tools and not template.supports_tools:
        seen += "; the template knows no tools, so a system message describes them"
        do = 'set parser.format to "xml" in the configuration, or use a model whose chat template knows tools'
    return (failed if len(refused) == len(refusals) else warning)(title, seen, do)


def _count_prompts(
    title: str, split: str, tasks: Sequence[Task], renderer: ChatRenderer | None, seq_len: int
) -> Check:
    counts = f"{len(tasks)} in {split}"
    if renderer is None:
        return ok(title, counts)
    lengths = prompt_lengths(tasks, renderer)
    too_long = [length for length in lengths if length >= seq_len]
    if not too_long:
        return ok(title, f"{counts}; prompts of up to {max(lengths)} tokens" if lengths else counts)
    found = (
        f"{len(too_long)} of {len(lengths)} prompts leave no room for a reply: they have up to "
        f"{max(too_long)} tokens, and seq_len is {seq_len}"
    )
    all_are = len(too_long) == len(lengths)
    return (failed if all_are else warning)(title, found, "raise --seq-len, or take shorter tasks")
