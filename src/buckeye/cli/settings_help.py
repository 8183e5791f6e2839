"""Help for commands whose flags are settings."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.cli.help import Rows, show_page
from buckeye.cli.rl_page import show_rl_page
from buckeye.config.help import (
    CONFIG_USAGE,
    flag_names,
    help_text,
    sections_named,
    sections_of,
    summary_of,
)
from buckeye.config.rl import RLConfig
from buckeye.config.settings import dotted
from buckeye.config.shared import BaseConfig, TrackedConfig

_ALL = "--help-all"
_ASKED = ("--help", "-h")


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return True if the args of a command request its help."""
    return _ALL in argv or any(word in argv for word in _ASKED)


def show_help(model: type[BaseConfig], prog: str, argv: Sequence[str]) -> None:
    """Print the requested help.

    That is the page of the command, the settings of one section (`--help SECTION`), or all settings, one per
    line (`--help-all`). Raises UsageError for an unknown section.
    """
    words = list(argv)
    section = next((words[i + 1] for i in range(len(words) - 1) if words[i] in _ASKED), "")
    if _ALL in words:
        print(help_text(model, prog))
    elif section and not section.startswith(("-", "@")):
        _show_section(model, prog, section)
    elif model is RLConfig:
        show_rl_page()
    else:
        _show_page(model, prog)


def _show_page(model: type[BaseConfig], prog: str) -> None:
    root, *_ = sections_of(model, prog)
    parts: dict[str, Rows] = {
        "Settings": root.settings,
        f"Sections ({prog} --help SECTION)": _section_rows(model),
    }
    usage = f"usage: {prog} [@ FILE.toml ...] [--NAME VALUE ...]"
    show_page(usage, summary_of(model), parts, f"{CONFIG_USAGE}\n\n{_where_the_rest_is(model, prog)}")


def _section_rows(model: type[BaseConfig]) -> Rows:
    names = dict.fromkeys(one.path[0] for one in sections_of(model, "") if one.path)
    return [(str(name), model.model_fields[str(name)].description or "") for name in names]


def _show_section(model: type[BaseConfig], prog: str, name: str) -> None:
    found = sections_named(model, prog, name)
    parts: dict[str, Rows] = {f"{one.title} {one.text}": one.settings for one in found}
    show_page(f"usage: {prog} [--NAME VALUE ...]", "", parts)


def _where_the_rest_is(model: type[BaseConfig], prog: str) -> str:
    found = dict.fromkeys(dotted(one.path[:1]) for one in sections_of(model, prog) if one.path)
    names = ", ".join(sorted(found, key=TrackedConfig.model_fields.__contains__))  # inherited settings last
    count = len(set(flag_names(model)))
    return (
        f"{prog} {_ALL}: all {count} settings. {prog} --help SECTION: {names}. "
        "--version; --debug adds tracebacks to errors."
    )
