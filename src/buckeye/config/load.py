"""`load_config`: from a command line to a configuration object, or to a message that names every problem."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from buckeye.config.flags import FileReference, apply, parse_flags, parse_text
from buckeye.config.help import help_text
from buckeye.config.problems import Problem, report
from buckeye.config.settings import Layer, Place, Settings
from buckeye.config.shared import BaseConfig
from buckeye.config.source import read_file
from buckeye.config.structure import resolve, unknown_setting, use_field_names
from buckeye.config.supported import check_supported
from buckeye.config.validation import validate
from buckeye.errors import ConfigError

# Environment variables as settings: `PRIME_MAX_STEPS`, `PRIME_TRAINER__MODEL__NAME`.

PREFIX = "PRIME_"
SEPARATOR = "__"


def read_variables(model: type[BaseConfig], environ: Mapping[str, str]) -> tuple[Settings, list[Problem]]:
    """The settings that environment variables make, and what is wrong with them.

    A variable whose first part is no setting of `model` (as PRIME_API_KEY) is somebody else's.
    """
    settings, problems = Settings(), []
    for name in sorted(environ):
        words = name.removeprefix(PREFIX).lower().split(SEPARATOR)
        if not name.startswith(PREFIX) or resolve(model, words[:1]).shape is None:
            continue
        place = Place(name, Layer.VARIABLE)
        target = resolve(model, words)
        if target.shape is None:
            problems.append(unknown_setting(model, target.path, place, target.owner))
            continue
        if any(isinstance(key, int) for key in target.path):
            message = "a list is set as a whole, as JSON."
            problems.append(Problem(path=target.path, place=place, message=message))
            continue
        try:
            settings.put(target.path, parse_text(environ[name], target.shape), place)
        except ValueError as error:
            problems.append(Problem(path=target.path, place=place, message=f"{error}."))
    return settings, problems


# Handing a configuration to another process.


def to_json(config: BaseConfig) -> str:
    """The whole configuration as JSON, which `@ FILE.json` reads back to an equal object; None is null."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


# `load_config`: from a command line to a configuration object, or to a message that names every problem.

__all__ = ["help_text", "load_config", "load_with_warnings"]

T = TypeVar("T", bound=BaseConfig)


def load_config(model: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> T:
    """The configuration that a command line makes: flags over files over `PRIME_*` variables over defaults.

    `environ` replaces `os.environ`. Raises ConfigError with every problem found.
    """
    config, _ = load_with_warnings(model, argv, environ)
    return config


def load_with_warnings(
    model: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[T, list[str]]:
    """As `load_config`, with a line for every setting that is accepted but only costs speed or memory."""
    settings, problems = _gather(model, argv, os.environ if environ is None else environ)
    config, wrong = validate(model, settings)
    problems += wrong
    unsupported = [] if config is None else list(_unsupported(config, settings))
    problems += [problem for problem in unsupported if problem.level == "error"]
    if config is None or problems:
        raise ConfigError(report(problems))
    return config, list(dict.fromkeys(str(problem) for problem in unsupported))


def _unsupported(config: BaseConfig, settings: Settings) -> Iterator[Problem]:
    """Problems with what is not built, where the person who wrote it knows it."""
    for problem in check_supported(config):
        path = settings.origin(problem.path)
        yield replace(problem, path=path, place=settings.place(path))


def _gather(
    model: type[BaseConfig], argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Settings, list[Problem]]:
    """All sources as one. Raises ConfigError at once for files that cannot be read: what they would say is
    not known."""
    flags = parse_flags(model, argv)
    settings, problems = read_variables(model, environ)
    problems += flags.problems
    unread = []
    for reference in flags.files:
        try:
            problems += _merge_file(model, settings, reference)
        except ConfigError as error:
            unread.append(Problem(message=str(error)))
    if unread:
        raise ConfigError(report([*unread, *problems]))
    problems += apply(flags.assignments, settings)
    return settings, problems + use_field_names(settings, model)


def _merge_file(model: type[BaseConfig], settings: Settings, reference: FileReference) -> list[Problem]:
    content = Settings()
    content.merge(read_file(reference.file, reference.place), at=reference.section)
    problems = use_field_names(content, model)
    settings.merge(content)
    return problems
