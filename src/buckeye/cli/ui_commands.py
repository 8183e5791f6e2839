"""The commands of `buckeye` that are offered here, by their words."""

from buckeye.cli.ui import report, ui

COMMANDS = {"ui": ui, "rl report": report}
