"""From a command line to a configuration, or to one message with everything that is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from buckeye.config.base import BaseConfig
from buckeye.config.canonical import canonical
from buckeye.config.check import check
from buckeye.config.fields import all_paths, field_type, type_text
from buckeye.config.flags import read_command_line
from buckeye.config.propagate import propagate
from buckeye.config.rl import RLConfig
from buckeye.config.tree import Node, place_of, plain
from buckeye.errors import ConfigError

T = TypeVar("T", bound=BaseConfig)


def load_config(model: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> T:
    """The configuration that a command line describes.

    Raises ConfigError naming every unknown or wrong setting with its place. `environ` replaces `os.environ`.
    """
    config, _ = load_with_warnings(model, argv, environ)
    return config


def load_with_warnings(
    model: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[T, list[str]]:
    """As `load_config`, and the settings that are accepted but have no effect."""
    raw, problems = read_command_line(model, argv, environ)
    tree = canonical(model, raw, problems)
    if model is RLConfig:
        propagate(tree, problems)
    try:
        config = model.model_validate(plain(tree))
    except ValidationError as error:
        problems += [_validation_message(model, tree, dict(item)) for item in error.errors()]
    except RecursionError:
        raise ConfigError("the settings are nested too deeply") from None
    if problems:
        raise ConfigError(_together(problems))
    findings = check(config)
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError(_together(errors))
    return config, [finding.message for finding in findings if finding.level == "warning"]


def _together(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration\n" + "\n".join(
        textwrap.indent(problem, "  ").replace("  ", "- ", 1) for problem in unique
    )


def _validation_message(model: type[BaseConfig], tree: Node, error: dict[str, Any]) -> str:
    """One pydantic error as `place: setting: what is wrong`."""
    location = _setting(tree, [str(part) for part in error["loc"]])
    setting = ".".join(location)
    place = place_of(tree, location)
    prefix = f"{place}: " if place not in (None, "default") else ""
    if error["type"] == "missing":
        flag = f"--{setting.replace('_', '-')}"
        return f"{prefix}{setting} is missing; give it in a file or as {flag}"
    value = error.get("input")
    shown = f", not {value!r}" if not isinstance(value, dict | list) or len(str(value)) < 60 else ""
    return f"{prefix}{setting}: {_expectation(error)}{shown}"


def _setting(tree: Node, location: list[str]) -> list[str]:
    """pydantic names the variant of a union in its locations; keys of settings do not have it."""
    return [part for i, part in enumerate(location) if not (i and _is_variant_tag(tree, location, i))]


def _is_variant_tag(tree: Node, location: list[str], position: int) -> bool:
    return location[position] in _TAGS and location[position - 1] in (
        "optim",
        "scheduler",
        "weight_broadcast",
    )


_TAGS = {"adamw", "muon", "sgd", "constant", "linear", "cosine", "filesystem", "nccl"}


def _expectation(error: dict[str, Any]) -> str:
    message = str(error["msg"])
    for pydantic_words, ours in (
        ("Input should be a valid integer, unable to parse string as an integer", "should be a whole number"),
        ("Input should be a valid integer", "should be a whole number"),
        ("Input should be a valid number, unable to parse string as a number", "should be a number"),
        ("Input should be a valid number", "should be a number"),
        ("Input should be a valid boolean, unable to interpret input", "should be true or false"),
        ("Input should be a valid boolean", "should be true or false"),
        ("Input should be a valid string", "should be text in quotes"),
        ("Input should be a valid list", "should be a list"),
        ("Input should be a valid dictionary", "should be a table"),
        ("Input should be", "should be"),
        ("Value error, ", ""),
    ):
        if message.startswith(pydantic_words):
            return ours + message[len(pydantic_words) :]
    if error["type"] == "model_type":
        return "should be a table of settings"
    if error["type"] == "extra_forbidden":
        return "this variant has no such setting"
    return message[:1].lower() + message[1:]


def help_text(model: type[BaseConfig], program: str) -> str:
    """Every flag with type, default and meaning, grouped by section."""
    lines = [
        f"usage: {program} [@ FILE] [--SETTING VALUE ...]",
        "",
        (model.__doc__ or "").strip(),
        "",
        "  @ FILE                read settings from a .toml or .json file; several may be given, later ones win",
        "  --SECTION @ FILE      read the settings of one section",
        "  --SETTING VALUE       set one; lists are 0,1,2; switches are --flag and --no-flag",
        "  --debug               show tracebacks",
        "",
    ]
    section: tuple[str, ...] | None = None
    for path, info in all_paths(model):
        if path[:-1] != section and not _is_section(info):
            section = path[:-1]
            lines += ["", f"{'.'.join(section) or program}:"]
        if _is_section(info):
            continue
        default = "" if info.is_required() or info.default is None else f" [{_default(info)}]"
        flag = f"--{'.'.join(path).replace('_', '-')}"
        meaning = " ".join((info.description or "").split())
        lines.append(f"  {flag} <{type_text(info.annotation)}>{default}")
        lines.append(f"      {meaning}")
    return "\n".join(lines)


def _is_section(info: Any) -> bool:
    kind = field_type(info.annotation)
    return bool(kind.models or kind.item_models)


def _default(info: Any) -> str:
    value = info.default
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
