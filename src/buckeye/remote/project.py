"""What of a project a run needs elsewhere: its files, its settings, its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.envs.mcp.environment import NAME
from buckeye.errors import UsageError
from buckeye.remote.manifest import Manifest, project_manifest
from buckeye.remote.steer import REMOTE_FILE, REMOTE_LOG
from buckeye.run.directory import RUN_FILE
from buckeye.run.resume import where_it_left_off
from buckeye.run.rl import played_environments
from buckeye.tasks.keys import KEYS, variables
from buckeye.tasks.variables import names_of

_OWN_ENVIRONMENTS = (NAME, "agent")
_STAYS = (
    *("batches", "checkpoints", "exports", "logs", "rollouts", "skipped", "wandb", "weights"),
    *(".lock", REMOTE_FILE, REMOTE_LOG),
)
"""What of a run is not sent when it goes on elsewhere; of its checkpoints only one is."""

_MODEL_FOLDER = ".buckeye-model"
_NOT_KEYS = {"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "USER"}
_RENTING = "PRIME_API_KEY"  # never leaves: it could rent and end everything
_TEXTS = (".yaml", ".yml", ".json", ".jsonl", ".toml")
_MOST_TEXT = 32 * 2**20


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

    @property
    def output_dir(self) -> Path:
        """Where the run is here."""
        return self.config.output_dir


def read_project(config_path: Path, *, resume: bool) -> Project:
    """Read a run's file, and find what it needs. With `resume` the run here goes along, as far as a resume
    needs it. Raises ConfigError for a wrong file, UsageError for what cannot travel."""
    root = Path.cwd().resolve()
    inside = _inside(config_path, root)
    config = load_config(RLConfig, ["@", str(config_path)], environ={})
    _refuse_packages(config)
    words = ["@", inside.as_posix()]
    output = config.output_dir
    there = output.as_posix()
    if output.is_absolute() or ".." in output.parts:
        there = f"outputs/{output.name}"
        words += ["--output-dir", there]
    model = Path(config.trainer.model.name)
    needed = [config_path.absolute(), *_named(config, root, model)]
    manifest = project_manifest(root, needed=needed, skipped=[output])
    words += _add_model(manifest, config, model, root)
    if resume:
        words.append("--resume")
        _add_run(manifest, output, there)
    return Project(
        root=root,
        config=config,
        arguments=tuple(words),
        output_there=there,
        manifest=manifest,
        secrets=_secrets(needed),
    )


def _refuse_packages(config: RLConfig) -> None:
    """Raise UsageError for an environment that is neither in the project nor in Buckeye."""
    for env in played_environments(config):
        if not Path(env.id).exists() and env.id not in _OWN_ENVIRONMENTS:
            raise UsageError(
                f"{env.id} is an environment that must be installed on the other machine, which this version "
                "does not do. Put its code into the project, and name it by its path."
            )


def _inside(path: Path, root: Path) -> Path:
    try:
        return path.resolve().relative_to(root)
    except ValueError:
        raise UsageError(
            f"{path} is not in the folder where we are, which is what travels. Go to the project's folder."
        ) from None


def _named(config: RLConfig, root: Path, model: Path) -> Iterator[Path]:
    """Every file and folder here that a text in the settings names. Raises UsageError for one elsewhere."""
    for text in dict.fromkeys(_texts(config.model_dump(mode="json"))):
        if not text or len(text) > 1000 or "\0" in text or text in (".", "/") or Path(text) == model:
            continue
        path = Path(text)
        if not path.exists() or path.resolve() == root:
            continue
        if not path.resolve().is_relative_to(root):
            raise UsageError(
                f"The configuration names {text}, which is outside of the folder that travels. Put it into "
                "the project's folder and name it relative to that."
            )
        yield path.absolute()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "output_dir":
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _add_model(manifest: Manifest, config: RLConfig, model: Path, root: Path) -> list[str]:
    """Let a model that is a folder here travel; the words that name it there."""
    if not model.is_dir():
        return []
    place = model.resolve()
    inside = place.is_relative_to(root) and not model.is_absolute()
    folder = model.as_posix() if inside else f"{_MODEL_FOLDER}/{place.name}"
    for path in sorted(place.rglob("*")):
        if path.is_file():
            manifest.files[f"{folder}/{path.relative_to(place).as_posix()}"] = path
    if inside:
        return []
    sections = [
        name
        for name in ("trainer", "orchestrator", "inference")
        if getattr(config, name) is not None and "name" in getattr(config, name).model.model_fields_set
    ]
    names = ["--model.name"] if config.model is not None else [f"--{name}.model.name" for name in sections]
    return [word for name in names for word in (name, folder)]


def _add_run(manifest: Manifest, output: Path, there: str) -> None:
    """Let a run go along: its records, and the checkpoint that it goes on from."""
    if not (output / RUN_FILE).is_file():
        raise UsageError(f"--resume: there is no run in {output}.")
    checkpoint = where_it_left_off(output)
    folders = [] if checkpoint is None else [checkpoint.path]
    folders += [path for path in output.iterdir() if path.is_dir() and path.name not in _STAYS]
    files = [path for path in output.iterdir() if path.is_file() and path.name not in _STAYS]
    for path in (*files, *(file for folder in folders for file in sorted(folder.rglob("*")))):
        if path.is_file() and not path.is_symlink():
            manifest.files[f"{there}/{path.relative_to(output).as_posix()}"] = path


def _secrets(needed: list[Path]) -> dict[str, str]:
    """The keys that Buckeye knows, and what files of the run mention as variables."""
    known = variables()
    names = [name for name in KEYS if name != _RENTING]
    for path in needed:
        if path.is_file() and path.suffix in _TEXTS and path.stat().st_size <= _MOST_TEXT:
            names += names_of(path.read_text(encoding="utf-8", errors="replace"))
    asked = [name if name in known else name.upper() for name in names]
    return {
        name: known[name]
        for name in asked
        if known.get(name) and name not in _NOT_KEYS and name != _RENTING and not name.startswith("SSH_")
    }
