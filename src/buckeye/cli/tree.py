"""The tree of commands: every command with a short summary.

Help reads only this table, so that it is fast. `commands.py` has the functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command; `words` follow `buckeye`.

    With `takes_settings` its flags are settings: the function gets the args after its name and returns the
    exit code. Other functions have parameters that typer parses.
    """

    words: str
    summary: str
    takes_settings: bool = False
    hidden: bool = False


COMMANDS = (
    Command("rl", "train a policy", takes_settings=True),
    Command("rl init", "a configuration from an MCP server"),
    Command("rl doctor", "check machine and configuration before a run", takes_settings=True),
    Command("rl tune", "find a learning rate by short forks", takes_settings=True),
    Command("rl schema", "JSON Schemas of the configuration files", takes_settings=True),
    Command("rl list", "list runs"),
    Command("rl status", "state, progress, waits and disk of a run"),
    Command("rl logs", "logs and events of a run"),
    Command("rl stop", "stop a run at a checkpoint"),
    Command("rl resume", "resume from the newest checkpoint"),
    Command("rl fork", "a new run from a checkpoint"),
    Command("rl clean", "delete what a run no longer needs"),
    Command("rl rollouts", "read, filter and export rollouts"),
    Command("rl compare", "compare two runs"),
    Command("rl diagnose", "why a run does not learn"),
    Command("rl replay", "compute a step again"),
    Command("rl report", "a run as one HTML file"),
    Command("rl pods list", "rented machines and their cost"),
    Command("rl pods offers", "machines for rent"),
    Command("rl pods attach", "the terminal of a remote run"),
    Command("rl pods terminate", "end a machine"),
    Command("rl pods gc", "end machines without a run"),
    Command("env new", "write a new environment that works"),
    Command("env check", "what can be gamed in it, what leaks"),
    Command("env play", "one rollout, by you, at random or by a model"),
    Command("env build", "build its image, start it once, write buckeye.lock.yaml"),
    Command("env push", "push its image to a registry"),
    Command("env install", "install one in its own interpreter"),
    Command("env list", "list installed environments"),
    Command("env remove", "remove an installed one"),
    Command("env trust", "allow what the tasks of a dataset use"),
    Command("hf", "tasks as a dataset, on the hub or in a folder"),
    Command("eval", "evaluate any model on an environment"),
    Command("sft", "fine-tune on chats", takes_settings=True),
    Command("chat", "talk to a model"),
    Command("serve", "serve a model to OpenAI clients", takes_settings=True),
    Command("export", "a checkpoint as a Hugging Face model"),
    Command("gateway", "serve MCP environments on one address"),
    Command("auth set", "store a key"),
    Command("auth status", "which keys are known, and from where"),
    Command("model tiny", "make a small model with random weights"),
    Command("vllm install", "install vLLM in its own environment"),
    Command("ui", "see runs in a browser"),
    Command("demo", "train a small model and show that it improved"),
    Command("explain", "what an error code or a finding means, and what to do"),
    Command("worker trainer", "the trainer of a run", takes_settings=True, hidden=True),
    Command("worker orchestrator", "the orchestrator of a run", takes_settings=True, hidden=True),
)

BY_WORDS = {command.words: command for command in COMMANDS}

GROUPS = {
    "rl": "train; see, steer and explain runs",
    "rl pods": "rented machines",
    "env": "write, check, share and install environments",
    "auth": "keys",
    "model": "make a small model",
    "vllm": "set up vLLM",
    "worker": "the processes of a run",
}
"""The groups of commands, with their purpose."""

TITLES = {
    "": {
        "Train": ("rl", "sft", "hf", "auth", "demo"),
        "Environments": ("env", "gateway", "eval"),
        "Models": ("chat", "serve", "export", "model", "vllm"),
        "Runs": ("ui", "explain"),
    },
    "env": {
        "Write": ("new", "check", "play"),
        "As an image": ("build", "push"),
        "Third-party": ("install", "list", "remove", "trust"),
    },
}
"""The commands of a group that help shows together, by title."""


def find_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words of the command or group at the start of a command line, and the remaining args."""
    known = BY_WORDS.keys() | GROUPS.keys()
    for count in range(min(3, len(argv)), 0, -1):
        words = " ".join(argv[:count])
        if words in known and all(argv[:count]):
            return words, list(argv[count:])
    return "", list(argv)


def child_commands(group: str) -> dict[str, str]:
    """Return the names below a group, with the summary of each.

    "" is the root. It leaves out hidden commands, which the page of a hidden group shows.
    """
    found: dict[str, str] = {}
    for command in COMMANDS:
        above = f"{group} " if group else ""
        if not command.words.startswith(above) or command.words == group or (command.hidden and not group):
            continue
        name, _, below = command.words.removeprefix(above).partition(" ")
        found[name] = GROUPS[f"{above}{name}"] if below or f"{above}{name}" in GROUPS else command.summary
    return found


def command_lines() -> Iterator[str]:
    """Yield one line per visible command, with its summary."""
    shown = [command for command in COMMANDS if not command.hidden]
    width = max(len(command.words) for command in shown)
    for command in shown:
        yield f"buckeye {command.words:<{width}}  {command.summary}"
