"""`rl --help`, and that of the other commands whose flags are settings."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.cli.help import Rows, show_page
from buckeye.config.help import (
    HOW_TO_WRITE,
    flag_names,
    help_text,
    sections_named,
    sections_of,
    setting_text,
    summary_of,
)
from buckeye.config.rl import RLConfig
from buckeye.config.settings import dotted
from buckeye.config.shared import BaseConfig, TrackedConfig
from buckeye.config.structure import Shape, fields_of
from buckeye.setup.recipe.flags import TrainFlags, written

_ALL = "--help-all"
_ASKED = ("--help", "-h")
_USAGE = """\
usage: buckeye rl [--config FILE.yaml] [--dataset TASKS] [--model MODEL] ...
       buckeye rl @ FILE.toml ..."""
_WHAT = (
    "Trains a model on an environment. The first form finds or makes what is not named, and writes the "
    "file of the second. Settings may be added to both."
)
_GROUPS = {
    "What is trained on what": ("config", "dataset", "model", "output", "no_eval"),
    "Where": (
        "gpus",
        "provider",
        "host",
        "identity_file",
        "region",
        "max_price",
        "max_hours",
        "disk_gb",
        "keep",
    ),
    "How": ("yes", "trust", "dry_run", "as_json", "quiet"),
}
_ANOTHER_LAUNCHER = {"--launcher NAME": "slurm or ray, with @ FILE.toml."}
_SETTING_VALUES = {
    "config": "FILE.yaml",
    "dataset": "TASKS",
    "model": "MODEL",
    "output": "DIR",
    "gpus": "4xH100",
    "host": "USER@HOST",
    "max_price": "DOLLARS",
    "max_hours": "HOURS",
    "disk_gb": "GB",
    "identity_file": "KEY",
    "region": "REGION",
}
_OFTEN = {
    "--max-steps N": "Steps of the training.",
    "--seq-len N": "Longest rollout, in tokens.",
    "--orchestrator.batch-size N": "Rollouts of a step.",
    "--orchestrator.sampling.max-tokens N": "Longest reply, in tokens.",
    "--trainer.optim.lr X": "Learning rate.",
}
_COMMANDS = {
    "init, doctor, tune, schema": "Set up; would it work; at which rate.",
    "list, status, logs": "See runs.",
    "rollouts": "What one played.",
    "diagnose, compare, replay": "Why none is learnt; which is better; again.",
    "attach, scale, stop, resume": "Steer one; go on with it.",
    "fork, clean, pods": "A checkpoint; free disk; machines.",
    "report": "One as a file.",
}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether the words of a command ask what it does."""
    return _ALL in argv or any(word in argv for word in _ASKED)


def show_help(model: type[BaseConfig], prog: str, argv: Sequence[str]) -> None:
    """Print what was asked for: the page of the command, the settings of one section (`--help SECTION`), or
    all of them, each on a line (`--help-all`). Raises UsageError for a section that there is not."""
    words = list(argv)
    section = next((words[i + 1] for i in range(len(words) - 1) if words[i] in _ASKED), "")
    if _ALL in words:
        print(help_text(model, prog))
    elif section and not section.startswith(("-", "@")):
        _show_section(model, prog, section)
    elif model is RLConfig:
        _show_rl_page()
    else:
        _show_page(model, prog)


def show_schema_help() -> None:
    """Print the page of `rl schema`."""
    what = (
        "Prints the JSON Schemas of all configuration files as one object; with DIR each is written there as "
        "a file, for editors that complete and check keys."
    )
    show_page("usage: rl schema [DIR]", what, {})


def flag_rows() -> dict[str, Rows]:
    """The flags of `buckeye rl` that are no settings, with what they mean, in groups."""
    shapes = fields_of(TrainFlags)
    grouped = {name for names in _GROUPS.values() for name in names}
    groups = _GROUPS | {"More": tuple(name for name in shapes if name not in grouped)}
    return {
        title: [(_flag(name, shapes[name]), setting_text(TrainFlags, name)) for name in names]
        for title, names in groups.items()
    }


def _flag(name: str, shape: Shape) -> str:
    value = _SETTING_VALUES.get(name) or "|".join(map(str, shape.choices)) or "VALUE"
    return f"--{written(name)}" if shape.is_flag else f"--{written(name)} {value}"


def _show_rl_page() -> None:
    flags = flag_rows()
    flags["Where"] = [*flags["Where"], *_ANOTHER_LAUNCHER.items()]
    parts = flags | {
        "Settings that are often changed": list(_OFTEN.items()),
        "Commands (rl COMMAND --help)": list(_COMMANDS.items()),
    }
    show_page(_USAGE, _WHAT, parts, _where_the_rest_is(RLConfig, "rl"))


def _show_page(model: type[BaseConfig], prog: str) -> None:
    root, *_ = sections_of(model, prog)
    parts: dict[str, Rows] = {
        "Settings": root.settings,
        f"Sections ({prog} --help SECTION)": _section_rows(model),
    }
    usage = f"usage: {prog} [@ FILE.toml ...] [--NAME VALUE ...]"
    show_page(usage, summary_of(model), parts, f"{HOW_TO_WRITE}\n\n{_where_the_rest_is(model, prog)}")


def _section_rows(model: type[BaseConfig]) -> Rows:
    names = dict.fromkeys(one.path[0] for one in sections_of(model, "") if one.path)
    return [(str(name), setting_text(model, str(name))) for name in names]


def _show_section(model: type[BaseConfig], prog: str, name: str) -> None:
    found = sections_named(model, prog, name)
    parts: dict[str, Rows] = {f"{one.title} {one.text}": one.settings for one in found}
    show_page(f"usage: {prog} [--NAME VALUE ...]", "", parts)


def _where_the_rest_is(model: type[BaseConfig], prog: str) -> str:
    found = dict.fromkeys(dotted(one.path[:1]) for one in sections_of(model, prog) if one.path)
    names = ", ".join(sorted(found, key=TrackedConfig.model_fields.__contains__))  # inherited, so the first
    count = len(set(flag_names(model)))
    return (
        f"{prog} {_ALL}: all {count} settings. {prog} --help SECTION: {names}. "
        "--version; --debug adds tracebacks to errors."
    )
