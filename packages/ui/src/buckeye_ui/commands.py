"""The commands of `buckeye` that are offered here, by their words."""

from buckeye_ui.command import ui, watch

COMMANDS = {"ui": ui, "rl watch": watch}
