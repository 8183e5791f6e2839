"""Commands that were removed, and the replacement of each."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.errors import UsageError

REMOVED_COMMANDS = {
    "rl export": "examples/kubernetes/job.yaml` or `examples/skypilot/task.yaml",
}
"""The words of a removed command after `buckeye`, and the command that replaces it."""


def removed_command_error(argv: Sequence[str]) -> UsageError | None:
    """Return the error for a removed command. None: `argv` (without `buckeye`) starts with another one."""
    for length in (2, 1):
        command = " ".join(argv[:length])
        if len(argv) >= length and command in REMOVED_COMMANDS:
            return UsageError(f"`buckeye {command}` was removed. Use `{REMOVED_COMMANDS[command]}`.")
    return None
