"""The commands of `buckeye` that are offered here, by their words."""

from buckeye_ui.command import ui

COMMANDS = {"ui": ui}
