"""Removed commands and their replacements."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.errors import UsageError

REMOVED_COMMANDS = {
    "rl export": "examples/kubernetes/job.yaml` or `examples/skypilot/task.yaml",
    "play": "buckeye env play",
    "env info": "buckeye env list NAME",
    "env shell": "buckeye env list NAME` and the interpreter in its row `python",
    "evals": "buckeye eval ENV --model MODEL",
    "rl bisect": "buckeye rl replay RUN --all",
    "rl bundle": "buckeye rl replay RUN --step N",
    "rl export-rollouts": "buckeye rl rollouts RUN --export jsonl",
    "rl curve": "buckeye ui RUN",
    "rl events": "buckeye rl logs RUN --events",
    "rl watch": "buckeye rl status RUN --watch",
    "rl attach": "buckeye rl pods attach RUN",
    "rl pods logs": "buckeye rl logs RUN",
    "rl scale": "buckeye rl resume RUN --inference.parallel.dp N",
    "env report": "buckeye rl report RUN",
    "trainer": "buckeye worker trainer",
    "orchestrator": "buckeye worker orchestrator",
    "inference": "buckeye serve",
}
"""Removed commands without `buckeye`, and the command or file that replaces each."""


def removed_command_error(argv: Sequence[str]) -> UsageError | None:
    """Return the error if `argv` (without `buckeye`) starts with a removed command, else None."""
    for length in (3, 2, 1):
        command = " ".join(argv[:length])
        if len(argv) >= length and command in REMOVED_COMMANDS:
            hint = f"Use `{REMOVED_COMMANDS[command]}`"
            return UsageError(f"`buckeye {command}` was removed", code="BK-CLI-REMOVED", hint=hint)
    return None
