"""Help for commands whose flags are settings."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.cli.help import Rows, show_page
from buckeye.cli.rl_page import show_rl_page
from buckeye.config.help import (
    CONFIG_USAGE,
    help_text,
    sections_named,
    sections_of,
    summary_of,
)
from buckeye.config.rl import RLConfig
from buckeye.config.shared import BaseConfig

_HELP_ALL = "--help-all"
_HELP = ("--help", "-h")
_FOOTER = "{prog} --help-all: all settings. --version; --debug adds tracebacks to errors."


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return True if the args of a command request its help."""
    return _HELP_ALL in argv or any(flag in argv for flag in _HELP)


def show_help(model: type[BaseConfig], prog: str, argv: Sequence[str]) -> None:
    """Print the page of a command, the settings of a section, or all settings.

    `--help SECTION` prints a section, `--help-all` prints all settings, one per line. Raises UsageError for
    an unknown section.
    """
    section = next((argv[i + 1] for i in range(len(argv) - 1) if argv[i] in _HELP), "")
    if _HELP_ALL in argv:
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
    show_page(usage, summary_of(model), parts, f"{CONFIG_USAGE}\n\n{_FOOTER.format(prog=prog)}")


def _section_rows(model: type[BaseConfig]) -> Rows:
    names = dict.fromkeys(section.path[0] for section in sections_of(model, "") if section.path)
    return [(str(name), model.model_fields[str(name)].description or "") for name in names]


def _show_section(model: type[BaseConfig], prog: str, name: str) -> None:
    sections = sections_named(model, prog, name)
    parts: dict[str, Rows] = {f"{section.title} {section.text}": section.settings for section in sections}
    show_page(f"usage: {prog} [--NAME VALUE ...]", "", parts)
