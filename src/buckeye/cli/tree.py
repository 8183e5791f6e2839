"""The tree of commands: every command, what it does in a few words, and how its code is loaded.

Help and completion read the table alone. The code of a command is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Command:
    """A command. `words` follow `buckeye`; `load` returns the functions of its module by their words.

    The flags of one that `takes_settings` are settings: it is given the words after its name and returns the
    exit code. The others are functions whose parameters typer reads.
    """

    words: str
    summary: str
    load: Callable[[], Functions]
    takes_settings: bool = False
    hidden: bool = False


def _init() -> Functions:
    from buckeye.cli import init

    return init.COMMANDS


def _doctor() -> Functions:
    from buckeye.cli import doctor

    return doctor.COMMANDS


def _tune() -> Functions:
    from buckeye.cli import tune

    return tune.COMMANDS


def _schema() -> Functions:
    from buckeye.cli import schema

    return schema.COMMANDS


def _train() -> Functions:
    from buckeye.cli import train

    return train.COMMANDS


def _runs() -> Functions:
    from buckeye.cli import runs

    return runs.COMMANDS


def _rollouts() -> Functions:
    from buckeye.cli import rollouts

    return rollouts.COMMANDS


def _compare() -> Functions:
    from buckeye.cli import compare

    return compare.COMMANDS


def _diagnose() -> Functions:
    from buckeye.cli import diagnose

    return diagnose.COMMANDS


def _replay() -> Functions:
    from buckeye.cli import replay

    return replay.COMMANDS


def _pods() -> Functions:
    from buckeye.cli import pods

    return pods.COMMANDS


def _env() -> Functions:
    from buckeye.cli import env

    return env.COMMANDS


def _env_check() -> Functions:
    from buckeye.cli import env_check

    return env_check.COMMANDS


def _env_image() -> Functions:
    from buckeye.cli import env_image

    return env_image.COMMANDS


def _env_installed() -> Functions:
    from buckeye.cli import env_installed

    return env_installed.COMMANDS


def _play() -> Functions:
    from buckeye.cli import play

    return play.COMMANDS


def _hf() -> Functions:
    from buckeye.cli import hf

    return hf.COMMANDS


def _evaluate() -> Functions:
    from buckeye.cli import evaluate

    return evaluate.COMMANDS


def _sft() -> Functions:
    from buckeye.cli import sft

    return sft.COMMANDS


def _model() -> Functions:
    from buckeye.cli import model

    return model.COMMANDS


def _worker() -> Functions:
    from buckeye.cli import worker

    return worker.COMMANDS


def _gateway() -> Functions:
    from buckeye.cli import gateway

    return gateway.COMMANDS


def _auth() -> Functions:
    from buckeye.cli import auth

    return auth.COMMANDS


def _vllm() -> Functions:
    from buckeye.cli import vllm

    return vllm.COMMANDS


def _ui() -> Functions:
    from buckeye.cli import ui

    return ui.COMMANDS


def _demo() -> Functions:
    from buckeye.cli import demo

    return demo.COMMANDS


COMMANDS = (
    Command("rl", "train a policy", _train, takes_settings=True),
    Command("rl init", "a configuration from an MCP server", _init),
    Command("rl doctor", "check machine and configuration before a run", _doctor, takes_settings=True),
    Command("rl tune", "find a learning rate by short forks", _tune, takes_settings=True),
    Command("rl schema", "JSON Schemas of the configuration files", _schema, takes_settings=True),
    Command("rl list", "list runs", _runs),
    Command("rl status", "state, progress, waits and disk of a run", _runs),
    Command("rl logs", "logs and events of a run", _runs),
    Command("rl stop", "stop a run at a checkpoint", _runs),
    Command("rl resume", "resume from the newest checkpoint", _runs),
    Command("rl fork", "a new run from a checkpoint", _runs),
    Command("rl clean", "delete what a run no longer needs", _runs),
    Command("rl rollouts", "read, filter and export rollouts", _rollouts),
    Command("rl compare", "compare two runs", _compare),
    Command("rl diagnose", "why a run does not learn", _diagnose),
    Command("rl replay", "compute a step again", _replay),
    Command("rl report", "a run as one HTML file", _ui),
    Command("rl pods list", "rented machines and their cost", _pods),
    Command("rl pods offers", "machines for rent", _pods),
    Command("rl pods attach", "the terminal of a remote run", _pods),
    Command("rl pods terminate", "end a machine", _pods),
    Command("rl pods gc", "end machines without a run", _pods),
    Command("env new", "write a new environment that works", _env),
    Command("env check", "what can be gamed in it, what leaks", _env_check),
    Command("env play", "one rollout, by you, at random or by a model", _play),
    Command("env build", "build its image, start it once, write buckeye.lock.yaml", _env_image),
    Command("env push", "push its image to a registry", _env_image),
    Command("env install", "install one in its own interpreter", _env_installed),
    Command("env list", "list installed environments", _env_installed),
    Command("env remove", "remove an installed one", _env_installed),
    Command("env trust", "allow what the tasks of a dataset use", _env),
    Command("hf", "tasks as a dataset, on the hub or in a folder", _hf),
    Command("eval", "evaluate any model on an environment", _evaluate),
    Command("sft", "fine-tune on chats", _sft, takes_settings=True),
    Command("chat", "talk to a model", _model),
    Command("serve", "serve a model to OpenAI clients", _worker, takes_settings=True),
    Command("export", "a checkpoint as a Hugging Face model", _model),
    Command("gateway", "serve MCP environments on one address", _gateway),
    Command("auth set", "store a key", _auth),
    Command("auth status", "which keys are known, and from where", _auth),
    Command("model tiny", "make a small model with random weights", _model),
    Command("vllm install", "install vLLM in its own environment", _vllm),
    Command("ui", "see runs in a browser", _ui),
    Command("demo", "train a small model and show that it improved", _demo),
    Command("worker trainer", "the trainer of a run", _worker, takes_settings=True, hidden=True),
    Command("worker orchestrator", "the orchestrator of a run", _worker, takes_settings=True, hidden=True),
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
"""The groups of commands, and what they are for."""

TITLES = {
    "": {
        "Train": ("rl", "sft", "hf", "auth", "demo"),
        "Environments": ("env", "gateway", "eval"),
        "Models": ("chat", "serve", "export", "model", "vllm"),
        "Runs": ("ui",),
    },
    "env": {
        "Write": ("new", "check", "play"),
        "As an image": ("build", "push"),
        "Third-party": ("install", "list", "remove", "trust"),
    },
}
"""Which commands of a group the help shows together, under which title."""


def find(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words of the command or group that a command line begins with, and the rest of the line."""
    known = BY_WORDS.keys() | GROUPS.keys()
    for count in range(min(3, len(argv)), 0, -1):
        words = " ".join(argv[:count])
        if words in known and all(argv[:count]):
            return words, list(argv[count:])
    return "", list(argv)


def children(group: str) -> dict[str, str]:
    """Return the visible names below a group ("" is the root), and what each is for."""
    found: dict[str, str] = {}
    for command in COMMANDS:
        above = f"{group} " if group else ""
        if command.hidden or not command.words.startswith(above) or command.words == group:
            continue
        name, _, below = command.words.removeprefix(above).partition(" ")
        found[name] = GROUPS[f"{above}{name}"] if below or f"{above}{name}" in GROUPS else command.summary
    return found


def lines() -> Iterator[str]:
    """Yield a line for every command that is not hidden, with its summary."""
    shown = [command for command in COMMANDS if not command.hidden]
    width = max(len(command.words) for command in shown)
    for command in shown:
        yield f"buckeye {command.words:<{width}}  {command.summary}"
