"""The tree of commands: every command with a short summary.

Help reads only this table, so that it is fast. `commands.py` imports the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Command of `buckeye`. Its `name` omits `buckeye`: `rl init`. `function` is MODULE.NAME in this package.

    If `takes_settings` is True, the flags of the command are settings: its function receives the args after
    the name and returns the exit code. Otherwise, typer parses the args.
    """

    name: str
    summary: str
    function: str
    takes_settings: bool = False
    hidden: bool = False


COMMANDS = (
    Command("rl", "train a policy", "train.rl", takes_settings=True),
    Command("rl init", "write a configuration for an MCP server", "init.init"),
    Command("rl doctor", "check the machine and a configuration before a run", "doctor.doctor"),
    Command("rl tune", "find a learning rate with short forks", "tune.tune"),
    Command("rl schema", "print JSON Schemas of the configuration files", "schema.schema"),
    Command("rl list", "list runs", "runs.list_runs"),
    Command("rl status", "show state, progress, waits and disk of a run", "runs.status"),
    Command("rl logs", "show logs and events of a run", "runs.logs"),
    Command("rl stop", "checkpoint and stop a run", "runs.stop"),
    Command("rl resume", "resume from the newest checkpoint", "runs.resume"),
    Command("rl fork", "start a new run from a checkpoint", "runs.fork"),
    Command("rl clean", "delete files that a run no longer needs", "runs.clean"),
    Command("rl rollouts", "read, filter and export rollouts", "rollouts.rollouts"),
    Command("rl compare", "compare two runs or two evaluations", "compare.compare_runs"),
    Command("rl diagnose", "find out why a run does not learn", "diagnose.diagnose_run"),
    Command("rl replay", "recompute a training step", "replay.replay"),
    Command("rl report", "write a run as one HTML file", "ui.report"),
    Command("rl pods list", "list rented machines and their cost", "pods.list_pods"),
    Command("rl pods offers", "list machines for rent", "pods.offers"),
    Command("rl pods attach", "open the terminal of a remote run", "pods.attach"),
    Command("rl pods terminate", "end a rented machine", "pods.terminate"),
    Command("rl pods gc", "end rented machines without a run", "pods.gc"),
    Command("fetch", "download all that a run needs, to train without a network", "fetch.fetch"),
    Command("env new", "create a new environment", "env.env_new"),
    Command("env check", "check for exploitable rewards and leaks", "env_check.env_check"),
    Command("env attack", "search for replies that are rewarded without the task", "env_attack.env_attack"),
    Command("env survey", "certify all environments of a library", "env_survey.env_survey"),
    Command("env play", "run rollouts with a person, random actions or a model", "env_play.play"),
    Command("env build", "build an image and write buckeye.lock.yaml", "env_image.env_build"),
    Command("env push", "push an image to a registry", "env_image.env_push"),
    Command("env install", "install an environment in a separate interpreter", "env_installed.env_install"),
    Command("env list", "list installed environments", "env_installed.env_list"),
    Command("env remove", "remove an installed environment", "env_installed.env_remove"),
    Command("env trust", "trust the programs and addresses of a dataset", "env.env_trust"),
    Command("hf", "publish tasks as a dataset, on the hub or in a folder", "hf.hf"),
    Command("eval", "evaluate a model on an environment", "evaluate.evaluate"),
    Command("sft", "fine-tune a model on chats", "sft.sft", takes_settings=True),
    Command("chat", "chat with a model", "model.chat"),
    Command("serve", "serve a model to OpenAI clients", "worker.serve", takes_settings=True),
    Command("export", "export a checkpoint as a Hugging Face model", "model.export"),
    Command("gateway", "serve MCP environments at one address", "gateway.gateway"),
    Command("auth set", "store a key", "auth.auth_set"),
    Command("auth status", "list the known keys and their sources", "auth.auth_status"),
    Command("model tiny", "create a small model with random weights", "model.model_tiny"),
    Command("model import", "convert a GGUF file to a model directory", "model.model_import"),
    Command("vllm install", "install vLLM in a separate environment", "vllm.install"),
    Command("ui", "inspect runs in a browser", "ui.ui"),
    Command("demo", "train a small model and show that it improved", "demo.demo"),
    Command("explain", "explain an error code or a finding", "explain.explain"),
    Command("worker trainer", "run the trainer of a run", "worker.trainer", takes_settings=True, hidden=True),
    Command(
        "worker orchestrator",
        "run the orchestrator of a run",
        "worker.orchestrator",
        takes_settings=True,
        hidden=True,
    ),
)

BY_NAME = {command.name: command for command in COMMANDS}

GROUPS = {
    "rl": "train a policy; inspect, control and diagnose runs",
    "rl pods": "list, rent and end machines",
    "env": "create, check, publish and install environments",
    "auth": "store and list keys",
    "model": "create a small model",
    "vllm": "set up vLLM",
    "worker": "run the processes of a run",
}
"""The groups of commands, with their purpose."""

TITLES = {
    "": {
        "Train": ("rl", "sft", "fetch", "hf", "auth", "demo"),
        "Environments": ("env", "gateway", "eval"),
        "Models": ("chat", "serve", "export", "model", "vllm"),
        "Runs": ("ui", "explain"),
    },
    "env": {
        "Write": ("new", "check", "attack", "play"),
        "As an image": ("build", "push"),
        "Third-party": ("install", "list", "survey", "remove", "trust"),
    },
}
"""Titles in the help of a group, each with its commands."""


def find_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command or group at the start of a command line, and the remaining args."""
    known = BY_NAME.keys() | GROUPS.keys()
    for count in range(min(3, len(argv)), 0, -1):
        name = " ".join(argv[:count])
        if name in known and all(argv[:count]):
            return name, list(argv[count:])
    return "", list(argv)


def child_commands(group: str) -> dict[str, str]:
    """Return the commands and groups directly below a group, each with its summary.

    The group "" is the root, which leaves out hidden commands.
    """
    children: dict[str, str] = {}
    prefix = f"{group} " if group else ""
    for command in COMMANDS:
        if not command.name.startswith(prefix) or command.name == group or (command.hidden and not group):
            continue
        child, _, rest = command.name.removeprefix(prefix).partition(" ")
        children[child] = GROUPS[prefix + child] if rest or prefix + child in GROUPS else command.summary
    return children


def commands_ending_in(word: str) -> list[str]:
    """Return the visible commands whose last word is `word`, in the order of the help."""
    return [command.name for command in COMMANDS if not command.hidden and command.name.split()[-1] == word]


def command_lines() -> Iterator[str]:
    """Yield one line per visible command, with its summary."""
    shown = [command for command in COMMANDS if not command.hidden]
    width = max(len(command.name) for command in shown)
    for command in shown:
        yield f"buckeye {command.name:<{width}}  {command.summary}"
