"""Load a configuration from a command line, or raise an error that lists every problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from buckeye.config.adapter import start_from_adapter
from buckeye.config.config_files import read_file
from buckeye.config.file_paths import resolve_file_paths
from buckeye.config.flags import apply_flags, parse_flags
from buckeye.config.problems import Problem, config_error, qualified
from buckeye.config.resolve_run import resolve_run
from buckeye.config.rl import RLConfig
from buckeye.config.settings import KeyPath, Settings
from buckeye.config.shared import BaseConfig, named_settings
from buckeye.config.structure import drop_unknown, replace_none_texts, shape_at, shape_of
from buckeye.config.validation import validate
from buckeye.errors import ConfigError

T = TypeVar("T", bound=BaseConfig)


def to_json(config: BaseConfig) -> str:
    """Return the configuration as JSON. `@ FILE.json` reads an equal object from this text."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def is_recorded(path: Path) -> bool:
    """Return True if the file is a resolved configuration in a run directory.

    An earlier version of Buckeye may have written the file, so unknown settings in it are ignored.
    """
    return path.parent.name == "configs" and path.suffix == ".json"


def load_config(model: type[T], argv: Sequence[str]) -> T:
    """Return the configuration of a command line. Flags override files, and files override defaults.

    Raise `ConfigError` with every problem found.
    """
    return load_with_warnings(model, argv)[0]


def load_with_warnings(model: type[T], argv: Sequence[str]) -> tuple[T, list[str]]:
    """Return the configuration of a command line, and warnings about settings with unexpected effects.

    Raise `ConfigError` with every problem found.
    """
    return load_settings(model, *_read_sources(model, argv))


def load_settings(
    model: type[T], settings: Settings, problems: Sequence[Problem] = ()
) -> tuple[T, list[str]]:
    """Return the configuration of raw settings, and its warnings. Complete the raw settings in place.

    Raise `ConfigError` with the given `problems` and every problem found.
    """
    replace_none_texts(settings, model)
    config, invalid = validate(model, settings, resolve_run if issubclass(model, RLConfig) else None)
    if config is None or problems:
        raise config_error([*problems, *invalid])
    config = start_from_adapter(config)
    return config, list(dict.fromkeys(_warnings(config, (), settings)))


def _warnings(config: BaseConfig, path: KeyPath, settings: Settings) -> Iterator[str]:
    for message in config.warnings():
        name = named_settings(message)[0]
        at = (*path, *name.split("."))
        yield str(Problem(path=at, location=settings.location(at), message=qualified(message, {name: at})))
    for name in type(config).model_fields:
        if isinstance(section := getattr(config, name), BaseConfig):
            yield from _warnings(section, (*path, name), settings)


def _read_sources(model: type[BaseConfig], argv: Sequence[str]) -> tuple[Settings, list[Problem]]:
    """Merge the settings of files and flags. Raise `ConfigError` if files cannot be read.

    Without these files, the problems of other settings would be misleading, so they are not reported.
    """
    flags = parse_flags(model, argv)
    settings, unreadable = Settings(), list[ConfigError]()
    for reference in flags.files:
        try:
            content = read_file(reference.file, reference.location)
            if is_recorded(Path(reference.file)):
                section = shape_at(model, reference.section)
                drop_unknown(section or shape_of(model), content.values)
            else:
                resolve_file_paths(content.values, Path(reference.file))
            settings.merge(content, at=reference.section)
        except ConfigError as error:
            unreadable.append(error)
    if unreadable:
        raise config_error([*unreadable, *flags.problems])
    problems = [*flags.problems, *apply_flags(flags.assignments, settings)]
    return settings, problems
