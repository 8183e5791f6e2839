"""Whether there are tasks to play: environments load, splits have tasks, prompts leave room for a reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from buckeye.config.environments import EnvConfig
from buckeye.config.rl import RLConfig
from buckeye.envs.base import Task
from buckeye.errors import BuckeyeError
from buckeye.inference.render import ChatRenderer
from buckeye.launch.preflight.check import Check, failed, ok, warning
from buckeye.orchestrator.curriculum import load_curricula
from buckeye.orchestrator.environments import (
    NamedEnvironment,
    evaluated_split,
    names_of,
    prompt_lengths,
    short_name,
    tasks_of,
    worker_settings,
)
from buckeye.workers.opening import open_environment

_Found = tuple[NamedEnvironment, Mapping[str, Sequence[Task]]]


def check_tasks(config: RLConfig, model_path: Path | None) -> Iterator[Check]:
    """Check each environment of training and of evaluation. Prompts are counted with the tokenizer of the
    model, if it is on this machine."""
    orchestrator = config.orchestrator
    try:
        renderer = ChatRenderer(model_path) if model_path is not None else None
    except BuckeyeError as error:
        yield failed("tokenizer", str(error), "")
        renderer = None
    trained: list[str | None] = ["train", *([None] if orchestrator.val is not None else [])]
    try:
        named = list(_named(config, trained))
    except BuckeyeError as error:
        yield failed("environments", str(error), "")
        return
    loaded = []
    for title, one, name, splits in named:
        try:
            found = _find(one, name, splits)
        except BuckeyeError as error:
            yield failed(title, str(error), "")
        except Exception as error:  # of the environment's own code
            yield failed(title, f"{type(error).__name__}: {error}", f"buckeye env check {one.id}")
        else:
            loaded += [found[0]] if splits is trained else []
            yield _check_prompts(title, found[1], renderer, orchestrator.seq_len)
    if orchestrator.curriculum and len(loaded) == len(orchestrator.env):
        try:
            load_curricula(loaded, orchestrator.seed, {})
        except BuckeyeError as error:
            yield failed("curriculum", str(error), "")


def title_of(one: EnvConfig) -> str:
    """What the check of the tasks to train on is called."""
    return f"tasks of {one.name or short_name(one.id)}"


def _named(
    config: RLConfig, trained: Sequence[str | None]
) -> Iterator[tuple[str, EnvConfig, str, Sequence[str | None]]]:
    """Title of the check, settings, name, and splits that will be played: None as `evaluated_split`. Raises
    as `names_of`."""
    evaluated = config.orchestrator.evaluated_env
    for name, one in zip(names_of(config.orchestrator.env), config.orchestrator.env, strict=True):
        yield title_of(one), one, name, trained
    for name, measured in zip(names_of(evaluated), evaluated, strict=True):
        yield f"{title_of(measured)} to evaluate", measured, name, [measured.split]


def _find(one: EnvConfig, name: str, splits: Sequence[str | None]) -> _Found:
    opened = open_environment(
        one.id, one.args, worker_settings(one, name, one.rollout_timeout or 600.0, None)
    )
    environment = NamedEnvironment(name=name, environment=opened)
    played = [evaluated_split(environment, split) for split in splits]
    return environment, {split: tasks_of(environment, split) for split in played}


def _check_prompts(
    title: str, splits: Mapping[str, Sequence[Task]], renderer: ChatRenderer | None, seq_len: int
) -> Check:
    counts = ", ".join(f"{len(tasks)} in {split}" for split, tasks in splits.items())
    if renderer is None:
        return ok(title, counts)
    lengths = [length for tasks in splits.values() for length in prompt_lengths(tasks, renderer)]
    if not lengths and any(tasks[0].messages for tasks in splits.values() if tasks):
        return warning(title, f"{counts}; the chat template takes none of the first prompts as they are", "")
    too_long = [length for length in lengths if length >= seq_len]
    if not too_long:
        return ok(title, f"{counts}; prompts of up to {max(lengths)} tokens" if lengths else counts)
    found = (
        f"{len(too_long)} of {len(lengths)} prompts leave no room for a reply: they have up to "
        f"{max(too_long)} tokens, and seq_len is {seq_len}"
    )
    all_are = len(too_long) == len(lengths)
    return (failed if all_are else warning)(title, found, "raise --seq-len, or take shorter tasks")
