"""The page of `rl --help`: flags of the command, and settings that are often changed.

This module contains all texts of the page, so that `rl --help` imports no configuration class.
"""

from __future__ import annotations

from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.cli.help import Rows, show_page

_USAGE = """\
usage: buckeye rl --model MODEL --dataset PROMPTS --reward FILE.py ...
       buckeye rl --model MODEL --env ENVIRONMENT ...
       buckeye rl @ run.toml ..."""
_DESCRIPTION = """\
Train a model. The first two forms write a configuration file and start it. Without --env and --reward, they
search this folder for an environment of MCP servers. All forms accept settings. Each process can have a file:

  rl --trainer @ train.toml --orchestrator @ orch.toml --inference @ infer.toml"""

FLAGS: dict[str, Rows] = {
    "Parts of the run": (
        ("--model MODEL", "Folder of a model or a run, or name on the Hugging Face hub."),
        ("--output-dir DIR", "Run directory."),
        ("--dataset DATA", "File or folder of prompts or MCP tasks, or hub name."),
        ("--reward REWARD", "FILE.py, FILE.py:FUNCTION, MODULE:FUNCTION, or a built-in reward; repeatable."),
        ("--reward-weights X,X", "Weight of each reward. Default: 1."),
        ("--eval-dataset DATA", "Prompts to evaluate on. Default: a tenth of the dataset."),
        ("--split NAME", "Split of the dataset to train on."),
        ("--prompt-column NAME", "Column with the prompts."),
        ("--answer-column NAME", "Column with the answers, for built-in rewards and the parameter `answer`."),
        ("--env ENVIRONMENT", "Environment: ID, PATH, or ID:name=value."),
        ("--config FILE.yaml", "Configuration of an MCP environment, from `buckeye rl init`."),
        ("--no-eval", "Do not evaluate on held-out tasks."),
        ("--no-wandb", "Do not log to Weights & Biases."),
    ),
    "Machine": (
        ("--gpus 4xH100", "Number and type. Default: all GPUs of this machine."),
        ("--provider local|prime|ssh", "This machine, a rented one, or your host."),
        ("--host USER@HOST", "Host for ssh: [USER@]HOST[:PORT]."),
        ("--identity-file KEY", "Private key for ssh."),
        ("--region REGION", "Rent only in these regions."),
        ("--max-price DOLLARS", "Maximum price of a rented machine, in US $ per hour."),
        ("--max-hours HOURS", "Stop the run after this time."),
        ("--disk-gb GB", "Disk to rent. Default: an estimate for the run."),
        ("--keep", "Do not end the rented machine, which continues to cost."),
    ),
    "Behavior": (
        ("--yes", "Do not prompt: use defaults, or report a missing flag."),
        ("--trust", "Trust the programs and addresses of the hub's tasks."),
        ("--dry-run", "Show the plan; write and start nothing."),
        ("--json", "Print the plan as one JSON object; with @ FILE, all settings."),
        ("--quiet", "Do not print the plan."),
    ),
}
"""The flags of `buckeye rl` that are not settings, in groups, with their meaning."""

SETTINGS: Rows = (
    ("--max-steps N", "Number of training steps."),
    ("--seq-len N", "Maximum length of a rollout, in tokens."),
    ("--orchestrator.batch-size N", "Rollouts per step."),
    ("--orchestrator.rollouts-per-example N", "Rollouts per task: the group size."),
    ("--orchestrator.sampling.max-tokens N", "Maximum length of a reply, in tokens."),
    ("--trainer.optim.lr X", "Learning rate."),
    ("--trainer.model.experimental.lora.rank N", "Train a LoRA adapter of this rank."),
    ("--trainer.ckpt.interval N", "Steps between checkpoints."),
    ("--inference-gpu-ids IDS", "GPUs of the inference servers, such as 0,1."),
    ("--trainer-gpu-ids IDS", "GPUs of the trainer, such as 2,3."),
    ("--wandb.project NAME", "Log to Weights & Biases."),
)
_COMMANDS: Rows = (
    ("init, doctor, tune, schema", "Prepare a run, check it, find a learning rate."),
    ("list, status, logs, report", "Inspect runs."),
    ("rollouts, compare, diagnose, replay", "Read rollouts, compare and diagnose runs."),
    ("stop, resume, fork, clean, pods", "Control runs, free disk, manage rented machines."),
)
_FOOTER = (
    "rl --help-all: all settings. rl --help SECTION: the settings of trainer, orchestrator, inference, ckpt, "
    "... --version; --debug adds tracebacks to errors."
)
_FILE_FLAGS = {".toml": "@", ".yaml": "--config", ".yml": "--config"} | dict.fromkeys(
    (".json", ".jsonl", ".parquet"), "--dataset"
)


def show_rl_page() -> None:
    """Print the page of `rl --help`."""
    parts = FLAGS | {"Settings that are often changed": SETTINGS, "Commands (rl COMMAND --help)": _COMMANDS}
    show_page(_USAGE, _DESCRIPTION, parts, _FOOTER)


def file_hint(arg: str) -> str:
    """Return a hint that names the flag for `arg` if `arg` is a file without a flag, else ""."""
    flag = _FILE_FLAGS.get(Path(arg).suffix)
    return f"Did you mean `buckeye rl {flag} {quoted(arg)}`?" if flag else ""
