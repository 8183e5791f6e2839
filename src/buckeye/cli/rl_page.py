"""The page of `rl --help`: the flags of the command, and the settings that users change most.

All texts are here, so that the page needs no configuration class. `rl --help-all` has all settings.
"""

from __future__ import annotations

from pathlib import Path

from buckeye.cli.help import Rows, show_page

_USAGE = """\
usage: buckeye rl [--config FILE.yaml] [--dataset TASKS] [--model MODEL] ...
       buckeye rl @ FILE.toml ..."""
_WHAT = (
    "Trains a model on an environment. The first form finds or makes what is missing, and writes the file of "
    "the second. Settings may be added to both."
)

FLAGS: dict[str, Rows] = {
    "What is trained on what": (
        ("--config FILE.yaml", "The environment, as `buckeye rl init` writes it."),
        ("--dataset TASKS", "A JSON file, a folder of `buckeye hf`, or a hub name."),
        ("--model MODEL", "A folder, or a name on the Hugging Face hub."),
        ("--output DIR", "Where all is written; with @ FILE it is --output-dir."),
        ("--no-eval", "No evaluation on held-out tasks, at start and end."),
        ("--no-wandb", "No Weights & Biases, although its key is known."),
    ),
    "Where": (
        ("--gpus 4xH100", "Number and type; else the GPUs that are here."),
        ("--provider local|prime|ssh", "This machine, a rented one, your host."),
        ("--host USER@HOST", "For ssh: [USER@]HOST[:PORT]."),
        ("--identity-file KEY", "The private key for ssh."),
        ("--region REGION", "Rent in these regions only."),
        ("--max-price DOLLARS", "The most that renting may cost, in US $ an hour."),
        ("--max-hours HOURS", "Stop after this time, however far the run is."),
        ("--disk-gb GB", "Disk to rent; else what the run should need."),
        ("--keep", "Do not end a rented machine; it continues to cost."),
    ),
    "How": (
        ("--yes", "Ask nothing: decide, or report which flag is missing."),
        ("--trust", "Allow what a hub's tasks use: programs, addresses."),
        ("--dry-run", "Show the plan; write and start nothing."),
        ("--json", "Print the plan as one JSON object."),
        ("--quiet", "Print no plan."),
    ),
}
"""The flags of `buckeye rl` that are not settings, in groups, with their meaning."""

SETTINGS: Rows = (
    ("--max-steps N", "Steps of the training."),
    ("--seq-len N", "Longest rollout, in tokens."),
    ("--output-dir DIR", "The directory of the run."),
    ("--orchestrator.batch-size N", "Rollouts of a step."),
    ("--orchestrator.rollouts-per-example N", "Rollouts of a task: the size of a group."),
    ("--orchestrator.sampling.max-tokens N", "Longest reply, in tokens."),
    ("--orchestrator.sampling.temperature X", "Temperature of sampling."),
    ("--orchestrator.eval.interval N", "Steps between two evaluations."),
    ("--trainer.optim.lr X", "Learning rate."),
    ("--trainer.loss.type NAME", "The loss."),
    ("--trainer.model.experimental.lora.rank N", "Train an adapter of this rank."),
    ("--trainer.ckpt.interval N", "Steps between two checkpoints."),
    ("--trainer.ckpt.keep N", "How many of the newest checkpoints stay."),
    ("--trainer.ckpt.resume-step N", "Resume from this step; -1 is the newest."),
    ("--inference-gpu-ids IDS", "GPUs of the inference servers, as 0,1."),
    ("--trainer-gpu-ids IDS", "GPUs of the trainer, as 2,3."),
    ("--inference.parallel.dp N", "Inference servers, each with a copy of the model."),
    ("--inference.parallel.tp N", "GPUs of one inference server."),
    ("--wandb.project NAME", "Log to Weights & Biases."),
)
_COMMANDS: Rows = (
    ("init, doctor, tune, schema", "Set up a run, check it, find its learning rate."),
    ("list, status, logs, report", "See runs."),
    ("rollouts, compare, diagnose, replay", "What it did, whether it is better, why it does not learn."),
    ("stop, resume, fork, clean, pods", "Steer runs; free disk; rented machines."),
)
_LAST = (
    "rl --help-all: all settings. rl --help SECTION: the settings of trainer, orchestrator, inference, ckpt, "
    "... --version; --debug adds tracebacks to errors."
)
_FLAG_OF_A_FILE = {".toml": "@", ".yaml": "--config", ".yml": "--config"} | dict.fromkeys(
    (".json", ".jsonl", ".parquet"), "--dataset"
)


def show_rl_page() -> None:
    """Print the page."""
    parts = FLAGS | {"Settings that are often changed": SETTINGS, "Commands (rl COMMAND --help)": _COMMANDS}
    show_page(_USAGE, _WHAT, parts, _LAST)


def file_hint(word: str) -> str:
    """Return a hint at the flag for a file, if the first arg after `rl` is one; else ""."""
    flag = _FLAG_OF_A_FILE.get(Path(word).suffix)
    return f"Files have a flag. Did you mean\n  buckeye rl {flag} {word}" if flag else ""
