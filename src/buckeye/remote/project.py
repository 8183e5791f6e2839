"""Collect the files, settings, keys and environments that a remote run needs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.foreign_files import NotRegularFileError, list_regular_files
from buckeye.base.json_lines import texts_in
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.dataset.requirements import imported_files, is_dataset_environment, named_files
from buckeye.errors import UsageError
from buckeye.launch.mcp_gateways import task_files
from buckeye.launch.preflight.disk import estimate_disk
from buckeye.launch.preflight.model import find_model
from buckeye.launch.preflight.software_checks import extras_of
from buckeye.launch.resume import find_resume_checkpoint
from buckeye.launch.resume_checks import check_resumable
from buckeye.launch.run_keys import keys_of_run, rollout_environments
from buckeye.remote.environments import NeededEnvironment, needed_environments
from buckeye.remote.follow import REMOTE_LOG
from buckeye.remote.manifest import Manifest, project_manifest
from buckeye.run_files.directory import REMOTE_FILE, RUN_FILE

_NOT_SENT = (
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
"""Files and folders of a run that a remote resume does not need. Only its checkpoint is sent."""

_MODEL_FOLDER = ".buckeye-model"
_SOFTWARE_GB = 60  # two environments with torch and CUDA (Buckeye's and vLLM's), their caches, and a reserve
_UNKNOWN_GB = 200  # disk size for a model of unknown size


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A project for a remote run.

    `root` is the local project folder. `arguments` are the args of the remote `rl`. `remote_output_dir` is
    relative to the remote project folder.
    """

    root: Path
    config: RLConfig
    arguments: tuple[str, ...]
    remote_output_dir: str
    manifest: Manifest
    secrets: Mapping[str, str]
    environments: tuple[NeededEnvironment, ...]
    extras: tuple[str, ...]

    @property
    def output_dir(self) -> Path:
        """Local output directory of the run."""
        return self.config.output_dir

    @property
    def disk_gb(self) -> int:
        """Gigabytes (10^9 bytes) for the files of the run, the model and the software."""
        total = estimate_disk(self.config, find_model(self.config.trainer.model.name)).total
        return _UNKNOWN_GB if total is None else _SOFTWARE_GB + math.ceil(1.2 * total / 1e9)


def read_project(config_path: Path, *, resume: bool) -> Project:
    """Load a configuration file, and return the project for its remote run.

    Raises ConfigError if the file is invalid.
    """
    config = load_config(RLConfig, ["@", str(config_path)])
    return make_project(config, config_path, resume=resume)


def make_project(config: RLConfig, config_path: Path, *, resume: bool) -> Project:
    """Return the project for the remote run of a configuration.

    The file `config_path` need not exist yet. With `resume`, the project has the files of the local run that
    a resume needs. Raises UsageError for a project that cannot be sent.
    """
    root = Path.cwd().resolve()
    relative = _relative_to_project(config_path, root)
    words = ["@", relative.as_posix()]
    output = config.output_dir
    remote_dir = output.as_posix()
    if output.is_absolute() or ".." in output.parts:
        remote_dir = f"outputs/{output.name}"
        words += ["--output-dir", remote_dir]
    model = Path(config.trainer.model.name)
    settings = config.model_dump(mode="json")
    for section in (settings, *(settings[name] or {} for name in ("trainer", "orchestrator", "inference"))):
        section.pop("model", None)  # _add_model sends it
    rollout_envs = rollout_environments(config)
    needed = [config_path.absolute(), *(path.absolute() for path in _find_named_paths(settings, root))]
    datasets = [env.args for env in rollout_envs if is_dataset_environment(env.id)]
    names = {"rewards": [name for args in datasets for name in named_files(args)]}
    needed += [path.absolute() for path in _find_named_paths(names, root)]
    imported = [path for args in datasets for path in imported_files(args)]
    needed += [root / _relative_to_project(path, root) for path in [*task_files(rollout_envs), *imported]]
    manifest = project_manifest(root, needed=needed, skipped=[output])
    words += _add_model(manifest, config, model, root)
    if resume:
        words.append("--resume")
        _add_run(manifest, config, remote_dir)
    return Project(
        root=root,
        config=config,
        arguments=tuple(words),
        remote_output_dir=remote_dir,
        manifest=manifest,
        secrets=keys_of_run(config),
        environments=needed_environments(rollout_envs),
        extras=tuple(extras_of(config)),
    )


def _add_model(manifest: Manifest, config: RLConfig, model: Path, root: Path) -> list[str]:
    """Add the local folders of the model and of its initial adapter.

    Returns the args of `rl` with the remote paths of these folders.
    """
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
    """Add a folder to the manifest, and return its remote path.

    The remote path of a folder in the project is its local path. Other folders get the remote path
    `otherwise`. If `given` is not a local folder, it is a name on the hub and is returned unchanged.
    """
    if not given.is_dir():
        return given.as_posix()
    place = given.resolve()
    travels = place.is_relative_to(root) and not given.is_absolute()
    folder = given.as_posix() if travels else otherwise
    try:
        for path in list_regular_files(place):
            manifest.files[f"{folder}/{path.relative_to(place).as_posix()}"] = path
    except NotRegularFileError as error:
        raise UsageError(f"{error}: it is not sent", code="BK-REMOTE-TRANSFER") from None
    return folder


def _add_run(manifest: Manifest, config: RLConfig, remote_dir: str) -> None:
    """Add the records of a run, and the checkpoint that the resume loads.

    Raises UsageError if the checkpoint does not match the configuration.
    """
    output = config.output_dir
    if not (output / RUN_FILE).is_file():
        raise UsageError(f"no run in {output}", code="BK-RUN-NOT-FOUND", at="--resume")
    checkpoint = find_resume_checkpoint(output)
    if checkpoint is not None:
        check_resumable(config.trainer, checkpoint)
    folders = [] if checkpoint is None else [checkpoint.path]
    folders += [path for path in output.iterdir() if path.is_dir() and path.name not in _NOT_SENT]
    files = [path for path in output.iterdir() if path.is_file() and path.name not in _NOT_SENT]
    for path in (*files, *(file for folder in folders for file in sorted(folder.rglob("*")))):
        if path.is_file() and not path.is_symlink():
            manifest.files[f"{remote_dir}/{path.relative_to(output).as_posix()}"] = path


def _relative_to_project(path: Path, root: Path) -> Path:
    """Return the path of a file relative to `root`. Raises UsageError if the file is outside of `root`."""
    try:
        return path.resolve().relative_to(root)
    except ValueError:
        raise UsageError(
            f"{path} is not in the current folder, and only this folder is sent",
            code="BK-REMOTE-TRANSFER",
            hint="run the command in the project's folder",
        ) from None


def _find_named_paths(settings: Mapping[str, Any], root: Path) -> Iterator[Path]:
    """Yield the path of every file and folder that a text in the settings names.

    The paths are relative to the working directory `root`. Raises UsageError for a path that would not exist
    on another machine.
    """
    for text in dict.fromkeys(texts_in(settings, without="output_dir")):
        if not text or len(text) > 1000 or "\0" in text:
            continue
        path = Path(text)
        if not os.path.exists(path) or path.resolve() in (root, Path("/")):
            continue
        if path.is_absolute() or ".." in path.parts or not path.resolve().is_relative_to(root):
            raise UsageError(
                f"the configuration names {text}, which is outside of the project's folder, or absolute",
                code="BK-REMOTE-TRANSFER",
                hint="move it into the project's folder and write its relative path",
            )
        yield path
