"""Stages of the demo. Each stage runs a command that a user could type. Interrupted stages resume."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from buckeye.base.process import EXIT_INTERRUPTED, PYTHON
from buckeye.base.storage import read_json
from buckeye.envs.registry import find_bundled_project
from buckeye.errors import RunError
from buckeye.run_files.directory import files_of_a_run
from buckeye.transport.checkpoint import list_checkpoints

ENVIRONMENT = "harleycooper/dakota1890"


class DemoPaths:
    """Paths of the files and folders of the demonstration in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, self.sft, self.rl, self.model = root / "base", root / "sft", root / "rl", root / "model"
        self.chats = root / "demonstrations.jsonl"

    def evals(self, name: str) -> Path:
        return self.root / f"evals-{name}"

    def rollouts(self, name: str) -> Path:
        """Return the file with the rollouts of an evaluation."""
        return self.evals(name) / "rollouts.jsonl"

    def settings(self, name: str) -> Path:
        """Return the file with the settings of an evaluation."""
        return self.evals(name) / "settings.json"

    def figures(self, name: str) -> Path:
        """Return the file with the figures, which exists after a complete evaluation."""
        return self.evals(name) / "figures.json"


def config_file(name: str) -> Path:
    """Return the path of a configuration file in the package."""
    return Path(str(files("buckeye.setup.demo").joinpath("configs", name)))


def max_steps(name: str) -> int:
    """Return the number of steps in a configuration file of the package."""
    return int(tomllib.loads(config_file(name).read_text(encoding="utf-8"))["max_steps"])


def run_stages(paths: DemoPaths, *, seed: int) -> None:
    """Run all stages: base model, demonstrations, warm start, evaluation, RL, evaluation."""
    start = warm_started_model(paths, seed=seed)
    _evaluate(paths, "before", start, seed)
    reinforce(paths, seed=seed)
    _evaluate(paths, "after", weights(paths.rl, "train.toml"), seed)


def warm_started_model(paths: DemoPaths, *, seed: int) -> Path:
    """Return the initial model of the RL run; create it if it does not exist."""
    paths.root.mkdir(parents=True, exist_ok=True)
    _make_base_model(paths, seed)
    _write_demonstrations(paths, seed)
    _warm_start(paths, seed)
    return weights(paths.sft, "sft.toml")


def weights(run: Path, config: str) -> Path:
    """Return the directory of a run's final weights."""
    return run / "weights" / f"step_{max_steps(config)}"


def _make_base_model(paths: DemoPaths, seed: int) -> None:
    if not paths.base.exists():
        size = ("--layers", "3", "--hidden", "192")
        _run_command(
            "buckeye", "model", "tiny", str(paths.base), "--env", ENVIRONMENT, *size, "--seed", str(seed)
        )


def _write_demonstrations(paths: DemoPaths, seed: int) -> None:
    if not paths.chats.exists():
        arguments = read_json(config_file("demonstrations.json"))
        options = [arg for key, value in arguments.items() for arg in _option_args(key, value)]
        bundle = find_bundled_project(ENVIRONMENT)
        env = ["env", f"PYTHONPATH={bundle / 'src'}"] if bundle is not None else []
        python = [*env, "python", "-m", "dakota1890"]
        _run_command(*python, "demonstrations", str(paths.chats), *options, "--seed", str(seed))


def _option_args(key: str, value: object) -> list[str]:
    return [f"--{key}"] if value is True else [f"--{key}", str(value)]


def _warm_start(paths: DemoPaths, seed: int) -> None:
    if weights(paths.sft, "sft.toml").exists():
        return
    resume = ["--ckpt.resume-step", "-1"] if list_checkpoints(paths.sft / "checkpoints") else []
    if not resume and paths.sft.exists():
        shutil.rmtree(paths.sft)  # killed before its first checkpoint, so nothing to resume
    _run_command(
        *("buckeye", "sft", "@"),
        str(config_file("sft.toml")),
        *("--model.name", str(paths.base), "--data.path", str(paths.chats)),
        *("--output-dir", str(paths.sft), "--seed", str(seed)),
        *resume,
    )


def reinforce(paths: DemoPaths, *, seed: int) -> None:
    """Run RL from the warm-started model to its end, unless it is complete."""
    if weights(paths.rl, "train.toml").exists():
        return
    has_started = bool(files_of_a_run(paths.rl))
    resume = ["--clean"] * has_started
    if has_started and list_checkpoints(paths.rl / "checkpoints"):
        resume = ["--resume"]
    _run_command("rl", *rl_args(paths, seed=seed), *resume)


def rl_args(paths: DemoPaths, *, seed: int) -> list[str]:
    """Return the args of the RL run, without `rl`."""
    return [
        *("--trainer", "@", str(config_file("train.toml"))),
        *("--orchestrator", "@", str(config_file("orch.toml"))),
        *("--inference", "@", str(config_file("infer.toml"))),
        *("--model.name", str(weights(paths.sft, "sft.toml")), "--orchestrator.seed", str(seed)),
        *("--output-dir", str(paths.rl)),
    ]


def _evaluate(paths: DemoPaths, name: str, model: Path, seed: int) -> None:
    """Evaluate greedy answers to every held-out task of the trained families.

    Leaves out the dictionary family: the model can only guess words that it has never seen.
    """
    if paths.figures(name).exists():
        return
    arguments = config_file("evaluation.json").read_text(encoding="utf-8").strip()
    resume = ["--resume"] if paths.settings(name).exists() else []
    _run_command(
        *("buckeye", "eval", ENVIRONMENT, "--args", arguments),
        *("--model", str(model), "--temperature", "0", "--max-tokens", "64", "--max-concurrent", "128"),
        *("--output-dir", str(paths.evals(name)), "--seed", str(seed)),
        *resume,
    )


def _run_command(program: str, *args: str) -> None:
    """Print a command and run it. Raises RunError if it fails, KeyboardInterrupt if it was interrupted."""
    started = time.monotonic()
    print(f"\n$ {shlex.join([program, *args])}", flush=True)
    status = _run(_argv(program, args))
    if status in (EXIT_INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if status:
        hint = "Read its messages above"
        raise RunError(f"`{program}` ended with exit code {status}", code="BK-RUN-PROCESS", hint=hint)
    print(f"  ({time.monotonic() - started:.0f} s)", flush=True)


def _run(argv: Sequence[str]) -> int:
    """Run a command to its end and return its exit code.

    Forwards SIGTERM, so that the command can end cleanly. Ctrl-C on a terminal reaches the command directly.
    """
    child = subprocess.Popen(argv)  # noqa: S603  a list of args, without a shell
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number)),
    }
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _argv(program: str, args: Sequence[str]) -> list[str]:
    """Return the command with the executables of this environment, even if its `bin` is not in PATH."""
    if program in ("env", "python"):
        return [sys.executable if arg == "python" else arg for arg in (program, *args)]
    script = Path(sys.executable).with_name(program)
    if os.access(script, os.X_OK):
        return [str(script), *args]
    module = [] if program == "buckeye" else [program]
    return [*PYTHON, "-m", "buckeye", *module, *args]
