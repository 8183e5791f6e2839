"""What of a project a run needs elsewhere: its files, its settings, its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.foreign_files import NotRegularError, own_files
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.mcp_gateways import files_of
from buckeye.launch.preflight.software import extras_of
from buckeye.launch.resume import where_it_left_off
from buckeye.launch.resume_checks import refuse_misfit
from buckeye.launch.run_keys import keys_of_run, played_environments
from buckeye.remote.environments import NeededEnvironment, needed_environments
from buckeye.remote.manifest import Manifest, project_manifest
from buckeye.remote.steer import REMOTE_LOG
from buckeye.remote.travel import inside, named_here
from buckeye.run_files.directory import REMOTE_FILE, RUN_FILE

_STAYS = (
    *(
        "batches",
        "checkpoints",
        "exports",
        "logs",
        "rollouts",
        "skipped",
        "tensorboard",
        "trackio",
        "wandb",
        "weights",
    ),
    *(".lock", REMOTE_FILE, REMOTE_LOG),
)
"""What of a run is not sent when it goes on elsewhere; of its checkpoints only one is."""

_MODEL_FOLDER = ".buckeye-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A run that is carried out elsewhere. `root` is the folder where we are, `arguments` the words after
    `rl` there, `output_there` relative to the project's folder there."""

    root: Path
    config: RLConfig
    arguments: tuple[str, ...]
    output_there: str
    manifest: Manifest
    secrets: Mapping[str, str]
    environments: tuple[NeededEnvironment, ...]
    extras: tuple[str, ...]

    @property
    def output_dir(self) -> Path:
        """Where the run is here."""
        return self.config.output_dir


def read_project(config_path: Path, *, resume: bool) -> Project:
    """Read a run's file, and find what it needs; see `project_of`. Raises ConfigError for a wrong file."""
    config = load_config(RLConfig, ["@", str(config_path)])
    return project_of(config, config_path, resume=resume)


def project_of(config: RLConfig, config_path: Path, *, resume: bool, pack: bool = True) -> Project:
    """What a configuration needs elsewhere, whose file may yet have to be written. With `resume` the run here
    goes along, as far as a resume needs it. Unless it is to `pack`, no environment is built. Raises
    UsageError for what cannot travel."""
    root = Path.cwd().resolve()
    relative = inside(config_path, root)
    words = ["@", relative.as_posix()]
    output = config.output_dir
    there = output.as_posix()
    if output.is_absolute() or ".." in output.parts:
        there = f"outputs/{output.name}"
        words += ["--output-dir", there]
    model = Path(config.trainer.model.name)
    settings = config.model_dump(mode="json")
    for section in (settings, *(settings[name] or {} for name in ("trainer", "orchestrator", "inference"))):
        section.pop("model", None)  # which has a way of its own
    played = played_environments(config)
    needed = [config_path.absolute(), *(path.absolute() for path in named_here(settings, root))]
    needed += [root / inside(path, root) for path in files_of(played)]
    manifest = project_manifest(root, needed=needed, skipped=[output])
    words += _add_model(manifest, config, model, root)
    if resume:
        words.append("--resume")
        _add_run(manifest, config, there)
    return Project(
        root=root,
        config=config,
        arguments=tuple(words),
        output_there=there,
        manifest=manifest,
        secrets=keys_of_run(config),
        environments=needed_environments(played, pack=pack),
        extras=tuple(extras_of(config)),
    )


def _add_model(manifest: Manifest, config: RLConfig, model: Path, root: Path) -> list[str]:
    """Let a model that is a folder here travel, and the adapter that it starts from; the words that name them
    there."""
    folder = _add_folder(manifest, model, root, f"{_MODEL_FOLDER}/{model.resolve().name}")
    adapter, words = config.trainer.model.adapter, list[str]()
    if adapter is not None:
        words = [
            "--trainer.model.adapter",
            _add_folder(manifest, adapter, root, f"{_MODEL_FOLDER}/adapter/{adapter.name}"),
        ]
    elif folder == model.as_posix():
        return []
    sections = [
        name
        for name in ("trainer", "orchestrator", "inference")
        if getattr(config, name) is not None and "name" in getattr(config, name).model.model_fields_set
    ]
    names = ["--model.name"] if config.model is not None else [f"--{name}.model.name" for name in sections]
    return [*words, *(word for name in names for word in (name, folder))]


def _add_folder(manifest: Manifest, given: Path, root: Path, otherwise: str) -> str:
    """Let a folder travel, to its path here or else to `otherwise`; return its path there. What is not a
    folder here is a name and stays the same."""
    if not given.is_dir():
        return given.as_posix()
    place = given.resolve()
    travels = place.is_relative_to(root) and not given.is_absolute()
    folder = given.as_posix() if travels else otherwise
    try:
        for path in own_files(place):
            manifest.files[f"{folder}/{path.relative_to(place).as_posix()}"] = path
    except NotRegularError as error:
        raise UsageError(f"{error}: it is not sent") from None
    return folder


def _add_run(manifest: Manifest, config: RLConfig, there: str) -> None:
    """Let a run go along: its records, and the checkpoint that it goes on from. Raises UsageError for one
    that does not fit the configuration."""
    output = config.output_dir
    if not (output / RUN_FILE).is_file():
        raise UsageError(f"--resume: there is no run in {output}.")
    checkpoint = where_it_left_off(output)
    if checkpoint is not None:
        refuse_misfit(config.trainer, checkpoint)
    folders = [] if checkpoint is None else [checkpoint.path]
    folders += [path for path in output.iterdir() if path.is_dir() and path.name not in _STAYS]
    files = [path for path in output.iterdir() if path.is_file() and path.name not in _STAYS]
    for path in (*files, *(file for folder in folders for file in sorted(folder.rglob("*")))):
        if path.is_file() and not path.is_symlink():
            manifest.files[f"{there}/{path.relative_to(output).as_posix()}"] = path
