"""`rl`, `trainer`, `orchestrator`, `inference`, `sft`, `evals`: commands whose flags are their
configuration."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from buckeye.cli.errors import run_command, take_debug_flag
from buckeye.process import INTERRUPTED, idle_spins

if TYPE_CHECKING:
    from buckeye.config.base import BaseConfig
    from buckeye.config.rl import RLConfig

    T = TypeVar("T", bound=BaseConfig)


def rl() -> None:
    """Train a policy: starts inference, orchestrator and trainer. `rl list`, `status`, `stop` and more look
    after runs."""
    run_command(lambda: _rl(take_debug_flag(sys.argv[1:])))


def trainer() -> None:
    """The trainer process alone."""
    run_command(lambda: _trainer(take_debug_flag(sys.argv[1:])))


def orchestrator() -> None:
    """The orchestrator process alone."""
    run_command(lambda: _orchestrator(take_debug_flag(sys.argv[1:])))


def inference() -> None:
    """Serve a model to OpenAI clients."""
    run_command(lambda: _inference(take_debug_flag(sys.argv[1:])))


def sft() -> None:
    """Fine-tune on chat data."""
    run_command(lambda: _sft(take_debug_flag(sys.argv[1:])))


def evals() -> None:
    """Evaluate a model on environments."""
    run_command(lambda: _evals(take_debug_flag(sys.argv[1:])))


COMMANDS: dict[str, Callable[[], None]] = {
    "rl": rl,
    "trainer": trainer,
    "orchestrator": orchestrator,
    "inference": inference,
    "sft": sft,
    "evals": evals,
}

RUN_COMMANDS = ("list", "status", "logs", "events", "stop", "attach", "resume", "clean", "fork")
"""`rl COMMAND`: on runs that were started before."""

RL_COMMANDS = ("init", "doctor", "schema", "pods", "export", *RUN_COMMANDS)
"""All words that may follow `rl`."""


def _rl(argv: list[str]) -> int:
    from buckeye.config.rl import RLConfig

    if argv[:1] == ["schema"]:
        return _schema(argv[1:])
    if argv[:1] == ["doctor"]:
        from buckeye.cli.doctor import run_doctor

        return run_doctor(argv[1:], lambda words: _load(RLConfig, words, "rl"))
    if argv[:1] == ["init"]:
        from buckeye.cli.init import run_init

        return run_init(argv[1:])
    if argv[:1] == ["pods"]:
        from buckeye.cli.pods import run_pods

        return run_pods(argv[1:])
    if argv[:1] == ["export"]:
        from buckeye.cli.export_run import run_export_run

        return run_export_run(argv[1:])
    if argv and argv[0] in RUN_COMMANDS:
        from buckeye.cli.runs import run_command_on_runs

        return run_command_on_runs(argv)
    from buckeye.cli.rl_help import asks_for_help, show_help

    if asks_for_help(argv):
        show_help(RLConfig, "rl", argv)
        return 0
    from buckeye.cli.slurm import is_for_slurm, start_slurm

    if is_for_slurm(argv):
        return start_slurm(argv, lambda words: _load(RLConfig, words, "rl"))
    from buckeye.cli.rl_flags import read_words

    words = read_words(argv)
    if words.is_of_parts:
        from buckeye.cli.rl import run_of_parts

        _tune_libraries("rl")
        return run_of_parts(words, _start_run)
    settings = words.plain_settings()
    config = _load(RLConfig, settings, "rl")
    if words.flags.remote:
        from buckeye.cli.rl_remote import start_remote

        return start_remote(words.only_file(), words.flags, resume=words.resumes)
    command = (
        [Path(sys.argv[0]).name, *settings] if sys.argv[0].endswith("rl") else ["buckeye", "rl", *settings]
    )
    if config.dry_run:
        from buckeye.run.dry_run import describe

        text, warnings = describe(config, command)
        print(text)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return 0
    return _start_run(config, command)


def _start_run(config: RLConfig, command: list[str]) -> int:
    """Look whether it can work, and start it. `command` is what starts it again."""
    from buckeye.cli.doctor import tell_before_start
    from buckeye.run.rl import run_rl

    tell_before_start(config)
    return run_rl(config, command)


def _trainer(argv: list[str]) -> int:
    from buckeye.config.trainer import TrainerConfig

    config = _with_local_model(_load(TrainerConfig, argv, "trainer"))
    from buckeye.trainer.rl import run_trainer

    return 0 if run_trainer(config) else INTERRUPTED


def _orchestrator(argv: list[str]) -> int:
    from buckeye.config.orchestrator import OrchestratorConfig

    config = _with_local_model(_load(OrchestratorConfig, argv, "orchestrator"))
    from buckeye.orchestrator.loop import run_orchestrator

    return 0 if run_orchestrator(config) else INTERRUPTED


def _inference(argv: list[str]) -> None:
    from buckeye.config.inference import InferenceConfig

    config = _with_local_model(_load(InferenceConfig, argv, "inference"))
    from buckeye.inference.server import run_inference

    run_inference(config)


def _sft(argv: list[str]) -> int:
    from buckeye.config.sft import SFTConfig

    given = _load(SFTConfig, argv, "sft")
    config = _with_local_model(given)
    from buckeye.config.dump import to_json
    from buckeye.monitor.tracker import check_wandb, tracked
    from buckeye.process import run_identity
    from buckeye.run.directory import claimed
    from buckeye.storage import write_file
    from buckeye.trainer.sft import run_sft

    first = os.environ.get("RANK", "0") == "0"
    wandb = config.wandb if first else None
    check_wandb(wandb)
    resumed = config.ckpt is not None and config.ckpt.resume_step is not None
    command = shlex.join(["sft", *argv, "--ckpt.resume-step", "-1"])
    output_dir = config.output_dir
    with claimed(output_dir, resumed=resumed, resume_command=command):
        if first:
            local = Path(given.model.name).exists()  # else it is a name on the hub, which others know too
            write_file(output_dir / "configs" / "sft.json", to_json(config if local else given))
        with tracked(wandb, output_dir=output_dir, run_id=run_identity().run_id, config=config):
            return 0 if run_sft(config) else INTERRUPTED


def _evals(argv: list[str]) -> int:
    from buckeye.config.evals import EvalsConfig

    config = _load(EvalsConfig, argv, "evals")
    from buckeye.run.evals import run_evals

    return run_evals(config)


def _load(model: type[T], argv: list[str], program: str) -> T:
    _tune_libraries(program)
    from buckeye.cli.rl_help import asks_for_help, show_help

    if asks_for_help(argv):
        show_help(model, program, argv)
        sys.exit(0)
    from buckeye.config.load import load_with_warnings

    config, warnings = load_with_warnings(model, argv)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return config


_COMPUTES = {"inference": True, "sft": True, "trainer": False}
"""The commands that compute, and whether they do so alone where nobody says. (A run tells its processes.)"""


def _tune_libraries(program: str) -> None:
    """Libraries read these when torch is imported, which no command has done yet.

    oneDNN keeps half a megabyte for every shape of a product, of which a batch of other lengths has dozens;
    to prepare it again costs nothing that can be measured.
    """
    if program in _COMPUTES:
        os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=_COMPUTES[program])
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")  # of ideep, between torch and oneDNN


def _with_local_model(config: T) -> T:
    """Replace `model.name` by the local directory of the model, fetching it if need be."""
    from buckeye.run.model_files import fetch_model

    model = config.model  # type: ignore[attr-defined]
    local = model.model_copy(update={"name": str(fetch_model(model.name))})
    return config.model_copy(update={"model": local})


def _schema(argv: list[str]) -> int:
    """`rl schema [DIR]`: print the JSON Schemas of all configuration files, or write one file each."""
    from buckeye.config.evals import EvalsConfig
    from buckeye.config.inference import InferenceConfig
    from buckeye.config.orchestrator import OrchestratorConfig
    from buckeye.config.rl import RLConfig
    from buckeye.config.schema import json_schema
    from buckeye.config.sft import SFTConfig
    from buckeye.config.trainer import TrainerConfig
    from buckeye.envs.mcp.config import gym_schema
    from buckeye.errors import UsageError
    from buckeye.storage import write_file

    schemas = {
        "rl": json_schema(RLConfig),
        "trainer": json_schema(TrainerConfig),
        "orchestrator": json_schema(OrchestratorConfig),
        "inference": json_schema(InferenceConfig),
        "sft": json_schema(SFTConfig),
        "evals": json_schema(EvalsConfig),
        "gym": gym_schema(),
    }
    if not argv:
        print(json.dumps(schemas, indent=1))
        return 0
    if len(argv) > 1 or argv[0].startswith("-"):
        raise UsageError(f"rl schema takes one directory, not {' '.join(argv)}")
    directory = Path(argv[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas.items():
        path = directory / f"{name}.schema.json"
        write_file(path, json.dumps(schema, indent=1) + "\n")
        print(path)
    return 0
