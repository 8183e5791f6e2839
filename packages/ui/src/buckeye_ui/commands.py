"""The commands of `buckeye` that are offered here, by their words."""

from buckeye_ui.command import report, ui

COMMANDS = {"ui": ui, "rl report": report}
