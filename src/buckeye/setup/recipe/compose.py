"""The configuration file of a run: settings and the reasons for them, written once and kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.config.flags import apply, parse_flags
from buckeye.config.problems import report
from buckeye.config.rl import RLConfig
from buckeye.config.settings import KeyPath, Settings, dotted
from buckeye.config.structure import resolve, use_field_names
from buckeye.errors import ConfigError, UsageError
from buckeye.mcp.environment import NAME
from buckeye.setup.recipe.model import ModelFacts
from buckeye.setup.recipe.sizes import Sizes, learning_rate
from buckeye.setup.recipe.where import GpuLayout

# Settings as a TOML file for people: tables in their order, with comments.

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def to_toml(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The settings as TOML. `comments` go above the key or table of that dotted name. Raises UsageError for
    None, which TOML has not."""
    return "\n".join(_table(values, (), comments)).strip() + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    """The plain values first: what follows a header belongs to it."""
    for key, value in values.items():
        if not _has_header(value, path, key):
            yield from _comment((*path, key), comments)
            yield f"{_key(key)} = {_value(value, (*path, key))}"
    for key, value in values.items():
        inner = (*path, key)
        if not _has_header(value, path, key):
            continue
        name = ".".join(map(_key, inner))
        tables = [(f"[{name}]", value)] if isinstance(value, Mapping) else [(f"[[{name}]]", v) for v in value]
        for header, table in tables:
            plain = not table or any(not _has_header(v, inner, k) for k, v in table.items())
            if plain or isinstance(value, list):
                yield ""
                yield from _comment(inner, comments)
                yield header
            yield from _table(table, inner, comments)


def _has_header(value: Any, path: tuple[str, ...], key: str) -> bool:
    """Whether a value gets a header of its own. Arguments of environments stay on one line."""
    if isinstance(value, Mapping):
        return not (key == "args" and "env" in path)
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _comment(path: tuple[str, ...], comments: Mapping[str, str]) -> list[str]:
    text = comments.get(dotted(path))
    return [f"# {line}" for line in text.splitlines()] if text else []


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, path: Sequence[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(k))} = {_value(v, (*path, str(k)))}" for k, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, path) for item in value)}]"
    if value is None:
        raise UsageError(
            f"{dotted(path)}: a TOML file cannot say None. Leave it out here, and add it where the "
            "configuration is started, as `buckeye rl @ run.toml --NAME None`"
        )
    return _text(str(value))


# The configuration file of a run: settings and the reasons for them, written once and kept.

RUN_CONFIG = "run.toml"

_INTERVAL: KeyPath = ("orchestrator", "eval", "interval")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a run is made of. `layout` is None where there is no GPU."""

    config: Path
    dataset: str
    model: ModelFacts
    sizes: Sizes
    layout: GpuLayout | None
    output_dir: Path

    @property
    def file(self) -> Path:
        """Where its configuration is written."""
        return self.output_dir / RUN_CONFIG

    @property
    def lora(self) -> bool:
        """Whether only adapters are trained."""
        return self.layout is not None and self.layout.lora


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of the run, as `rl` reads them."""
    sizes, layout, steps = recipe.sizes, recipe.layout, recipe.sizes.max_steps
    environment = {"id": NAME, "args": {"taskset": recipe.dataset, "config_path": str(recipe.config)}}
    orchestrator: dict[str, Any] = {
        "batch_size": sizes.batch_size,
        "rollouts_per_example": sizes.rollouts_per_example,
        "sampling": {"max_tokens": sizes.max_tokens},
        "env": [environment],
    }
    if sizes.held_out:
        orchestrator["eval"] = {"interval": steps, "num_examples": sizes.held_out, "env": [environment]}
    trainer: dict[str, Any] = {"optim": {"lr": learning_rate(recipe.model.parameters, lora=recipe.lora)}}
    if recipe.lora:
        trainer["model"] = {"experimental": {"lora": {}}}
    values: dict[str, Any] = {"output_dir": str(recipe.output_dir), "max_steps": steps}
    values["seq_len"] = sizes.seq_len
    if layout is not None:
        values["inference_gpu_ids"] = list(layout.inference)
        values["trainer_gpu_ids"] = list(layout.trainer)
    inference = {"parallel": {"tp": layout.tp}} if layout is not None and layout.tp > 1 else {}
    return values | {
        "model": {"name": recipe.model.name},
        "orchestrator": orchestrator,
        "trainer": trainer,
        "inference": inference,
    }


def run_text(recipe: Recipe, words: Sequence[str] = ()) -> str:
    """The text of the file, with the settings that the flags `words` make over those of the recipe. Raises
    ConfigError for flags that are no settings."""
    settings = Settings(settings_of(recipe))
    flags = parse_flags(RLConfig, words)
    problems = [*flags.problems, *apply(flags.assignments, settings)]
    problems += use_field_names(settings, RLConfig)
    if problems:
        raise ConfigError(report(problems))
    for one in flags.assignments:
        if settings.get(one.path) is None and _is_none_by_itself(one.path):
            del settings.get(one.path[:-1])[one.path[-1]]  # TOML has no None
    _evaluate_at_the_end(settings, {one.path for one in flags.assignments})
    head = (
        f"# Written by `buckeye rl`. Start it again, from the same folder, with\n"
        f"#   buckeye rl @ {recipe.file} --output-dir ANOTHER\n\n"
    )
    return head + to_toml(settings.values, _comments(recipe, settings))


def _is_none_by_itself(path: KeyPath) -> bool:
    """Whether what is not set there is None."""
    section = resolve(RLConfig, [str(key) for key in path[:-1]]).shape
    fields = [table.model_fields.get(str(path[-1])) for table in section.tables] if section else []
    return bool(fields) and all(field is not None and field.get_default() is None for field in fields)


def _evaluate_at_the_end(settings: Settings, given: set[KeyPath]) -> None:
    """Whoever asks for another number of steps wants the evaluation after the last of those."""
    steps, evaluation = settings.get(("max_steps",)), settings.get(_INTERVAL[:-1])
    if isinstance(evaluation, dict) and isinstance(steps, int) and _INTERVAL not in given:
        evaluation[_INTERVAL[-1]] = steps


def _comments(recipe: Recipe, settings: Settings) -> dict[str, str]:
    sizes = recipe.sizes
    how = "counted" if sizes.counted else "estimated"
    group = settings.get(("orchestrator", "rollouts_per_example"))
    comments = {
        "seq_len": f"Longest rollout in tokens; the longest prompt has {sizes.prompt_tokens} ({how}).",
        "orchestrator": f"Every task of a batch is played {group} times, and these are compared.",
        "orchestrator.sampling.max_tokens": "Of one reply.",
        "orchestrator.eval": "Held-out tasks, before the first step and after the last.",
        "trainer.optim.lr": "Larger models need smaller steps.",
    }
    if recipe.layout is not None and recipe.layout.shared:
        comments["inference_gpu_ids"] = "One GPU samples and trains."
    if recipe.lora:
        comments["trainer.model.experimental.lora"] = "The GPUs have room for adapters, not for all weights."
    return comments
