"""Check the tasks of a run: environments load, splits have tasks, and prompts leave room for a reply."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
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
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, warning
from buckeye.orchestrator.environments import (
    NamedEnvironment,
    check_command,
    choose_evaluation_split,
    default_environment_name,
    environment_names,
    get_first_prompts,
    load_split,
    prompt_lengths,
    worker_settings,
)
from buckeye.workers.loading import open_environment, open_in_process

Opener = Callable[[str, Mapping[str, Any], WorkerSettings], Environment | None]

_CPU_SECONDS = 1  # processor time for these checks at a start
_TIMEOUT_SECONDS = 10.0


def check_tasks(
    config: RLConfig, model_path: Path | None, *, opener: Opener = open_environment
) -> Iterator[Check]:
    """Yield the result of one check per environment, for training and for evaluation.

    If the model is on this machine, its tokenizer counts the tokens of prompts. An environment is skipped if
    `opener` returns None.
    """
    try:
        renderer = ChatRenderer(model_path) if model_path is not None else None
    except BuckeyeError as error:
        yield failed_with("tokenizer", error)
        renderer = None
    except ModuleNotFoundError:  # the check of the tokenizer reports it
        renderer = None
    template = renderer.template if renderer is not None else None
    yield from _check_environments(config, opener, template, renderer)


def _check_environments(
    config: RLConfig, opener: Opener, template: ChatTemplate | None, renderer: ChatRenderer | None
) -> Iterator[Check]:
    try:
        entries = list(_checked_environments(config))
    except BuckeyeError as error:
        yield failed_with("environments", error)
        return
    open_once = _opens_once(opener)
    for title, settings, name, split in entries:
        try:
            loaded = _load_tasks(settings, name, split, open_once)
        except BuckeyeError as error:
            yield failed_with(title, error)
        except Exception as error:  # the code of the environment may raise any error
            yield failed(
                title,
                f"{type(error).__name__}: {error}",
                check_command(settings),
                code="BK-ENV-FAILED",
            )
        else:
            if loaded is not None:
                environment, split, tasks = loaded
                tools = PROBE_TOOLS if getattr(environment, "offers_tools", False) else ()
                rejected = _rejected_prompts(title, tasks, template, tools) if template is not None else None
                yield rejected or _count_prompts(title, split, tasks, renderer, config.orchestrator.seq_len)


def task_check_name(settings: EnvConfig) -> str:
    """Return the name of the check of the training tasks of an environment."""
    return f"tasks of {settings.name or default_environment_name(settings.id)}"


def check_tasks_quickly(config: RLConfig, model_path: Path | None = None) -> list[Check]:
    """Run the checks of `check_tasks` for at most one second of CPU time, and return the finished checks.

    The checks use no workers and no tokenizer. They run in a child process, so that no environment stays
    loaded in this process.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_checks, args=(config, model_path, sender))
    child.start()
    sender.close()
    deadline, checks = time.monotonic() + _TIMEOUT_SECONDS, []
    with receiver, suppress(EOFError, OSError):  # the child has ended
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            checks.append(receiver.recv())
    child.kill()
    child.join()
    return checks


def _run_checks(config: RLConfig, model_path: Path | None, sender: Connection) -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    template = read_template(model_path) if model_path is not None else None
    for check in _check_environments(config, open_in_process, template, None):
        sender.send(check)
    sender.close()


def _checked_environments(config: RLConfig) -> Iterator[tuple[str, EnvConfig, str, str | None]]:
    """Yield the title of the check, the settings, the name and the split, for each environment.

    If the split is None, `choose_evaluation_split` chooses it. Raises the errors of `environment_names`.
    """
    trained, evaluated = config.orchestrator.env, config.orchestrator.evaluation_environments
    for name, settings in zip(environment_names(trained), trained, strict=True):
        yield task_check_name(settings), settings, name, TRAIN
    for name, evaluation in zip(environment_names(evaluated), evaluated, strict=True):
        yield f"{task_check_name(evaluation)} to evaluate", evaluation, name, evaluation.split


def _opens_once(opener: Opener) -> Opener:
    """Return an opener that opens equal environments only once: most runs train and evaluate on one."""
    opened: dict[str, Environment | None] = {}

    def open_once(env_id: str, args: Mapping[str, Any], settings: WorkerSettings) -> Environment | None:
        key = repr((env_id, args, settings))
        if key not in opened:
            opened[key] = opener(env_id, args, settings)
        return opened[key]

    return open_once


def _load_tasks(
    settings: EnvConfig, name: str, split: str | None, opener: Opener
) -> tuple[Environment, str, Sequence[Task]] | None:
    environment = opener(
        settings.id, settings.args, worker_settings(settings, name, settings.rollout_timeout or 600.0, None)
    )
    if environment is None:
        return None
    named = NamedEnvironment(name=name, environment=environment)
    used_split = choose_evaluation_split(named, split)
    return environment, used_split, load_split(named, used_split)


def _rejected_prompts(
    title: str, tasks: Sequence[Task], template: ChatTemplate, tools: Sequence[Tool]
) -> Check | None:
    """Return a failure or warning if the chat template rejects the first prompt of a task, else None."""
    results = [template.find_problem(messages, tools) for messages in get_first_prompts(tasks)]
    problems = [problem for problem in results if problem is not None]
    if not problems:
        return None
    seen = f"the chat template rejects {len(problems)} of {len(results)} first prompts: {problems[0]}"
    do = "change these prompts (often: remove the system message), the model, or its chat_template.jinja"
    if tools and not template.supports_tools:
        seen += "; the template does not support tools, so a system message describes them"
        do = 'set parser.format to "xml", or use a model whose chat template supports tools'
    return (failed if len(problems) == len(results) else warning)(title, seen, do)


def _count_prompts(
    title: str, split: str, tasks: Sequence[Task], renderer: ChatRenderer | None, seq_len: int
) -> Check:
    counts = f"{len(tasks)} in {split}"
    if renderer is None:
        return ok(title, counts)
    lengths = prompt_lengths(tasks, renderer)
    too_long = [length for length in lengths if length >= seq_len]
    if not too_long:
        return ok(title, f"{counts}; longest prompt: {max(lengths)} tokens" if lengths else counts)
    seen = (
        f"{len(too_long)} of {len(lengths)} prompts leave no room for a reply: they have up to "
        f"{max(too_long)} tokens, and seq_len is {seq_len}"
    )
    result = failed if len(too_long) == len(lengths) else warning
    return result(title, seen, "raise `--seq-len`, or use shorter tasks")
