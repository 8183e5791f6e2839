"""`rl`, `trainer`, `orchestrator`, `inference`, `sft`: commands whose flags are their configuration."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from buckeye import __version__
from buckeye.base.distribution import ask, is_there
from buckeye.base.process import INTERRUPTED, idle_spins
from buckeye.cli.completion import complete, is_asked
from buckeye.cli.errors import run_command, run_typer, take_debug_flag
from buckeye.cli.removed import removed_command_error
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.config.rl import RLConfig
    from buckeye.config.sft import SFTConfig
    from buckeye.config.shared import BaseConfig

    T = TypeVar("T", bound=BaseConfig)


def rl() -> None:
    """Train a policy: starts inference, orchestrator and trainer. `rl list`, `status`, `stop` and more look
    after runs."""
    _carry_out(_rl)


def trainer() -> None:
    """The trainer process alone."""
    _carry_out(_trainer)


def orchestrator() -> None:
    """The orchestrator process alone."""
    _carry_out(_orchestrator)


def inference() -> None:
    """Serve a model to OpenAI clients."""
    _carry_out(_inference)


def sft() -> None:
    """Fine-tune on chat data."""
    _carry_out(_sft)


def _carry_out(program: Callable[[list[str]], int | None]) -> None:
    """Run a program on the words that it was started with."""

    def words() -> int | None:
        if is_asked():
            return complete(within=True)
        argv = take_debug_flag(sys.argv[1:])
        if argv == ["--version"]:
            print(f"buckeye {__version__}")
            return 0
        return program(argv)

    run_command(words)


COMMANDS: dict[str, Callable[[], None]] = {
    "rl": rl,
    "trainer": trainer,
    "orchestrator": orchestrator,
    "inference": inference,
    "sft": sft,
}

RUN_COMMANDS = (
    "list",
    "status",
    "logs",
    "rollouts",
    "compare",
    "diagnose",
    "report",
    "replay",
    "stop",
    "scale",
    "attach",
    "resume",
    "clean",
    "fork",
)
"""`rl COMMAND`: on runs that were started before."""

RL_COMMANDS = ("init", "doctor", "tune", "schema", "pods", *RUN_COMMANDS)
"""All words that may follow `rl`."""


_ON_CONFIGURATIONS = {
    "doctor": "buckeye.cli.doctor:run_doctor",
    "tune": "buckeye.cli.tune:run_tune",
}
"""`rl COMMAND` with the words of a configuration, and what carries it out."""


def _rl(argv: list[str]) -> int:
    if (error := removed_command_error(["rl", *argv])) is not None:
        raise error
    from buckeye.config.rl import RLConfig

    if argv[:1] == ["schema"]:
        return _schema(argv[1:])
    if argv and argv[0] in _ON_CONFIGURATIONS:
        run = ask(_ON_CONFIGURATIONS[argv[0]], f"`rl {argv[0]}`")
        return int(run(argv[1:], lambda words: _load(RLConfig, words, "rl")))
    if argv[:1] == ["init"]:
        return int(ask("buckeye.cli.init:run_init", "`rl init`")(argv[1:]))
    if argv[:1] == ["pods"]:
        return int(ask("buckeye.cli.pods:run_pods", "`rl pods`")(argv[1:]))
    if argv and argv[0] in RUN_COMMANDS:
        from buckeye.cli.runs import runs_app

        return run_typer(runs_app, argv, "rl")
    from buckeye.cli.settings_help import asks_for_help, show_help

    if asks_for_help(argv):
        show_help(RLConfig, "rl", argv)
        return 0
    if any(word == "--launcher" or word.startswith("--launcher=") for word in argv):
        launch = ask("buckeye.cli.slurm:launch", "--launcher")
        return int(launch(argv, lambda words: _load(RLConfig, words, "rl"), _carry_out_run))
    from buckeye.setup.recipe.flags import read_words

    words = read_words(argv)
    if words.is_of_parts:
        run_of_parts = ask("buckeye.cli.from_flags:run_of_parts", "a run from its parts")
        _tune_libraries("rl")
        return int(run_of_parts(words, _start_run))
    settings = words.plain_settings()
    config = _load(RLConfig, settings, "rl")
    if words.flags.remote:
        from buckeye.cli.dry_run import carry_out

        show_remote = ask("buckeye.cli.remote:show_remote", "--provider")
        start_remote = ask("buckeye.cli.remote:start_remote", "--provider")
        file, flags, resume = words.only_file(), words.flags, words.resumes
        return carry_out(
            config,
            show=lambda: show_remote(file, config, flags, resume=resume),
            start=lambda: start_remote(file, flags, resume=resume),
        )
    return _carry_out_run(config, settings)


def _carry_out_run(config: RLConfig, settings: list[str]) -> int:
    """Start a run from here, or show it. `settings` are the words that it was loaded from."""
    from buckeye.cli.dry_run import carry_out

    program = [Path(sys.argv[0]).name] if sys.argv[0].endswith("rl") else ["buckeye", "rl"]
    command = [*program, *settings]
    return carry_out(
        config, show=lambda: _show_run(config, command), start=lambda: _start_run(config, command)
    )


def _show_run(config: RLConfig, command: list[str]) -> None:
    from buckeye.cli.dry_run import describe, show_described

    show_described(*describe(config, command))


def _start_run(config: RLConfig, command: list[str]) -> int:
    """Look whether it can work, and start it. `command` is what starts it again."""
    from buckeye.base.distribution import need

    need("torch", "Training")
    from buckeye.launch.rl import run_rl

    _tell_before_start(config)
    return run_rl(config, command)


def _tell_before_start(config: RLConfig) -> None:
    """Warn of what the quick checks have found. Raises UsageError for what the run would not survive; the
    memory plan is an estimate and only warns."""
    from buckeye.launch.preflight.doctor import Examination, examine
    from buckeye.launch.preflight.fitting import MEMORY

    checks = examine(Examination(config=config), "start")
    broken = [check for check in checks if check.state == "failed" and check.name != MEMORY]
    if broken:
        raise UsageError("\n".join(check.line for check in broken))
    for check in checks:
        if check.state in ("warning", "failed"):
            print(f"warning: {check.line}", file=sys.stderr)


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

    config = _load(InferenceConfig, argv, "inference")
    from buckeye.launch.preflight.model import fetch_base, is_adapter

    adapter = Path(config.model.name).resolve() if is_adapter(config.model.name) else None
    local = _with_local_model(config) if adapter is None else _of_model(config, fetch_base(adapter))
    from buckeye.inference.server.server import run_inference

    run_inference(local, adapter=adapter)


def _sft(argv: list[str]) -> int:
    from buckeye.config.sft import SFTConfig
    from buckeye.transport.checkpoint import bring, open_store, uploads_of

    given = _load(SFTConfig, argv, "sft")
    config = _with_local_model(given)
    resumed = config.ckpt is not None and config.ckpt.resume_step is not None
    first = os.environ.get("RANK", "0") == "0"
    store = config.ckpt.store if config.ckpt is not None else None
    if first and store is not None:
        open_store(store).probe()
        bring(config.output_dir, config.ckpt)
    if first or store is None:
        _refuse_misfit(config)
    from buckeye.base.process import run_identity
    from buckeye.base.storage import write_file
    from buckeye.config.load import to_json
    from buckeye.launch.resume import without_flags
    from buckeye.monitor.tracker import check_trackers, tracked
    from buckeye.run_files.directory import claimed
    from buckeye.trainer.sft import run_sft

    trackers = config.trackers(config.wandb) if first else []
    check_trackers(trackers)
    again = without_flags(argv, ("--ckpt.resume-step",))
    command = shlex.join(["sft", *again, "--ckpt.resume-step", "-1"])
    output_dir = config.output_dir
    with claimed(output_dir, resumed=resumed, resume_command=command):
        if first:
            local = Path(given.model.name).exists()  # else it is a name on the hub, which others know too
            write_file(output_dir / "configs" / "sft.json", to_json(config if local else given), mode=0o600)
        with tracked(trackers, output_dir=output_dir, run_id=run_identity().run_id, config=config):
            with uploads_of(output_dir, config.ckpt if first else None) as uploads:
                done = run_sft(config)
            if not done and first:
                print(f"Stopped. Continue with:\n  {command}", file=sys.stderr)
            return INTERRUPTED if not done else int(uploads is not None and bool(uploads.left))


def _refuse_misfit(config: SFTConfig) -> None:
    """Before torch is imported and anything is written."""
    from buckeye.launch.resume_checks import refuse_misfit
    from buckeye.trainer.model.trainable import refuse_untrainable
    from buckeye.transport.checkpoint import resolve_checkpoint

    refuse_untrainable(config.model.name)

    step = config.ckpt.resume_step if config.ckpt is not None else None
    if step is not None:
        refuse_misfit(config, resolve_checkpoint(config.output_dir / "checkpoints", step), section="")


def _load(model: type[T], argv: list[str], program: str) -> T:
    _tune_libraries(program)
    from buckeye.cli.settings_help import asks_for_help, show_help

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
    from buckeye.launch.preflight.model import fetch_model

    return _of_model(config, fetch_model(config.model.name))  # type: ignore[attr-defined]


def _of_model(config: T, directory: Path) -> T:
    model = config.model.model_copy(update={"name": str(directory)})  # type: ignore[attr-defined]
    return config.model_copy(update={"model": model})


def _schema(argv: list[str]) -> int:
    """`rl schema [DIR]`: print the JSON Schemas of all configuration files, or write one file each."""
    from buckeye.cli.settings_help import asks_for_help, show_schema_help

    if asks_for_help(argv):
        show_schema_help()
        return 0
    from buckeye.base.storage import write_file
    from buckeye.cli.completion import configurations
    from buckeye.config.help import json_schema

    schemas = {name: json_schema(model) for name, model in configurations().items()}
    if is_there("buckeye.mcp"):
        schemas["gym"] = ask("buckeye.mcp.config:gym_schema", "`rl schema`")()
    if not argv:
        print(json.dumps(schemas, indent=1))
        return 0
    if len(argv) > 1 or argv[0].startswith("-"):
        raise UsageError(f"`rl schema` takes one directory, not {' '.join(argv)}")
    directory = Path(argv[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas.items():
        path = directory / f"{name}.schema.json"
        write_file(path, json.dumps(schema, indent=1) + "\n")
        print(path)
    return 0
