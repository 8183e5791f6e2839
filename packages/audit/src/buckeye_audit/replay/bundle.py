"""One file with what is needed to compute a step of a run again, and to see what went on around it.

It is a zip archive of plain files of a run's directory: JSON, text and safetensors, nothing that is executed.
`bundle.json` names each with its size and SHA-256. Texts and settings are without secrets.
"""

from __future__ import annotations

import hashlib
import json
import platform
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from buckeye import __version__, runs
from buckeye.base.disk import human_bytes
from buckeye.base.foreign_files import NotRegularError, own_files
from buckeye.base.json_lines import read_json_lines
from buckeye.base.storage import read_json, step_directory, sync, write_file
from buckeye.config.load import load_config
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.metrics import read_metrics
from buckeye.monitor.redact import redacted
from buckeye.transport.checkpoint import COMMITTED, read_commit

INDEX = "bundle.json"
MODEL = "model"
"""The folder of the model that the run began with."""

_FORMAT = 1
_FILES = ("run.json", "status.json", "micro_batch.json", "metrics.jsonl", "events.jsonl")
_FOLDERS = ("configs", "trained", "weights", "checkpoints", "rollouts", "logs", MODEL)
_SUFFIXES = ("", ".json", ".jsonl", ".jinja", ".log", ".model", ".safetensors", ".stdout", ".txt")
_STEPS_AROUND = 50
_EVENTS = 500
_LOG_BYTES = 64_000
_MOST_FILES = 5_000
_MOST_BYTES = 50_000_000_000
_MOST_INDEX_BYTES = 2_000_000
_PART = 2**20
_UNREADABLE = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, msgspec.MsgspecError),
    *(NotImplementedError, RuntimeError),  # of zipfile: an unknown compression, a password
)

Until = Literal["gradient", "weights"]


class _Listed(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Bundled(msgspec.Struct, kw_only=True, frozen=True):
    """What a bundle says of itself. `until` is how far its step can be computed again, None for not at all;
    `versions` are those it was made with; `left_out` says what is not in it, and why."""

    format: int
    run: str
    step: int
    until: Until | None
    versions: dict[str, str]
    left_out: tuple[str, ...]
    files: dict[str, _Listed]


@dataclass
class _Contents:
    """What goes in, by name: a file, or its content."""

    room: int
    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, files: Mapping[str, Path | bytes], what: str) -> bool:
        """Put all of these in, or say that there was no room."""
        size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in files.values())
        if size > self.room:
            self.left_out.append(f"{what}, {human_bytes(size)}: raise --max-mb")
            return False
        self.room -= size
        self.files.update(files)
        return True


# Writing one.


def write_bundle(run: Path, config: TrainerConfig, step: int, target: Path, *, max_bytes: int) -> Bundled:
    """Write what belongs to step `step` (counted from 0) of a run to the new file `target`; all files
    together have at most `max_bytes` before they are compressed.

    Raises UsageError if the batch of the step was not kept, or the file is there already.
    """
    from buckeye_audit.replay.step import require_kept, start_of

    if target.exists():
        raise UsageError(f"{target} is there already. Nothing was written: name another file with --out.")
    require_kept(run, step)
    contents = _Contents(room=max_bytes)
    for name in ("configs", *_FILES[:3]):
        for path in sorted((run / name).rglob("*.json")) if (run / name).is_dir() else [run / name]:
            if path.is_file():
                content = msgspec.json.encode(redacted(read_json(path)))
                contents.add({path.relative_to(run).as_posix(): content}, name)
    contents.add(
        {"metrics.jsonl": _lines(_metrics(run, step)), "events.jsonl": _lines(_events(run, step))},
        "metrics and events",
    )
    if not contents.add(_batch(run, step), f"batch {step}"):
        raise UsageError(f"Batch {step} has no room: {contents.left_out[-1]}")
    contents.add(_log_tails(run), "ends of logs")
    until = _add_weights(contents, run, config, step, start_of)
    contents.add(_rollouts(run, step), f"rollouts of step {step}")
    told = Bundled(
        format=_FORMAT,
        run=str(read_json(run / "run.json").get("run_id", "")) if (run / "run.json").is_file() else "",
        step=step,
        until=until,
        versions=_versions(),
        left_out=tuple(contents.left_out),
        files={name: _listed(source) for name, source in contents.files.items()},
    )
    _write(target, told, contents.files)
    return told


def _add_weights(
    contents: _Contents, run: Path, config: TrainerConfig, step: int, start_of: Callable[..., Any]
) -> Until | None:
    """What the step can be computed from: a checkpoint or the first model, with all batches since; else the
    weights of the step alone, with which there are no new ones."""
    base = Path(config.model.name)
    needs_base = config.model.experimental.lora is not None or bool(config.loss.kl_coef)
    for until in ("weights", "gradient"):
        try:
            start = start_of(run, config, step, until=until)
        except BuckeyeError as error:
            contents.left_out.append(" ".join(str(error).split()))
            continue
        files: dict[str, Path | bytes] = {}
        for earlier in range(start.step, step):
            files |= _batch(run, earlier)
        if start.path.is_relative_to(run):
            files |= _without_orchestrator(run, start.path)
        if base.is_dir() and (needs_base or start.path == base):
            files |= {f"{MODEL}/{name}": path for name, path in _folder(base, base).items()}
        elif needs_base:
            contents.left_out.append(f"the model {config.model.name}, which is no directory here")
        if contents.add(files, f"what the step is computed from as far as {until}"):
            return until
    return None


def _folder(root: Path, folder: Path) -> dict[str, Path | bytes]:
    """The files of a folder by their names in `root`. Raises UsageError for a link that leads elsewhere."""
    try:
        return {
            path.relative_to(root).as_posix(): path for path in own_files(folder) if path.suffix in _SUFFIXES
        }
    except NotRegularError as error:
        raise UsageError(f"{error}: it is not put into a bundle") from None


def _batch(run: Path, step: int) -> dict[str, Path | bytes]:
    """What was kept of a step."""
    files = _folder(run, step_directory(run / "trained", step))
    return {
        name: msgspec.json.encode(redacted(read_json(run / name))) if name.endswith(".json") else path
        for name, path in files.items()
    }


def _without_orchestrator(run: Path, start: Path) -> dict[str, Path | bytes]:
    """A checkpoint, or published weights, without what the orchestrator has put there."""
    files = {
        name: path for name, path in _folder(run, start).items() if "orchestrator" not in Path(name).parts
    }
    if (start / COMMITTED).is_file():
        commit = read_commit(start)
        kept = {name: digest for name, digest in commit["files"].items() if name.startswith("trainer/")}
        files[(start / COMMITTED).relative_to(run).as_posix()] = json.dumps(
            {**commit, "files": kept}
        ).encode()
    return files


def _metrics(run: Path, step: int) -> Iterator[Mapping[str, Any]]:
    near = range(step - _STEPS_AROUND, step + _STEPS_AROUND + 1)
    return (record for record in read_metrics(run / "metrics.jsonl") if record["step"] in near)


def _events(run: Path, step: int) -> Iterable[Mapping[str, Any]]:
    """The events before the step was trained, the nearest ones, and as many after it."""
    trained = [
        r["time"]
        for r in read_metrics(run / "metrics.jsonl")
        if (r["process"], r["step"]) == ("trainer", step)
    ]
    events = list(read_json_lines(run / "events.jsonl"))
    at = sum(1 for event in events if trained and event.get("time", 0) <= trained[-1])
    return events[max(0, at - _EVENTS) : at + _EVENTS]


def _rollouts(run: Path, step: int) -> dict[str, Path | bytes]:
    path = run / "rollouts" / f"step_{step}.jsonl"
    return {f"rollouts/{path.name}": _lines(read_json_lines(path))} if path.is_file() else {}


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in redacted(list(records)))


def _log_tails(run: Path) -> dict[str, Path | bytes]:
    """The ends of the logs of all attempts, of each process the newest bytes."""
    tails: dict[str, Path | bytes] = {}
    for path in sorted((run / "logs").rglob("*")):
        if path.suffix in (".stdout", ".log") and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                text = file.read().decode(errors="replace")
            tails[path.relative_to(run).as_posix()] = "\n".join(redacted(text.splitlines()[-1000:])).encode()
    return tails


def _versions() -> dict[str, str]:
    import torch

    return {
        "buckeye": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _listed(source: Path | bytes) -> _Listed:
    if isinstance(source, bytes):
        return _Listed(len(source), hashlib.sha256(source).hexdigest())
    with source.open("rb") as file:
        return _Listed(source.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _write(target: Path, told: Bundled, files: Mapping[str, Path | bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(INDEX, msgspec.json.format(msgspec.json.encode(told), indent=1))
            for name, source in files.items():
                if isinstance(source, bytes):
                    archive.writestr(name, source)
                else:
                    archive.write(source, name)
        sync(unfinished)
        unfinished.rename(target)
        sync(target.parent)


# Opening one, which may be of anybody.


@contextmanager
def opened(run: str) -> Iterator[tuple[Path, Bundled | None]]:
    """The directory of the run that the word means; of a bundle it is a temporary one, with what the bundle
    says of itself. Raises UsageError for a file that is no bundle, or one that cannot be trusted."""
    if not Path(run).is_file():
        yield runs.open(run).path, None
        return
    with tempfile.TemporaryDirectory(prefix="buckeye-bundle-") as folder:
        try:
            told = _unpack(Path(run), Path(folder))
        except _UNREADABLE as error:
            raise UsageError(f"{run} cannot be read as a bundle of `rl bundle` ({error}).") from None
        yield Path(folder), told


def trainer_settings(directory: Path, changes: Sequence[str] = ()) -> TrainerConfig:
    """The trainer's settings of a run, or of an opened bundle, whose model is the one that it brings, with
    `changes` as flags. Raises UsageError for a bundle whose settings name code to run."""
    config = load_config(TrainerConfig, ["@", str(directory / "configs" / "trainer.json"), *changes])
    if not (directory / INDEX).is_file():
        return config
    if config.loss.type == "custom":
        raise UsageError(
            "The run of this bundle has a loss function of its own, which is not in it, and would be taken "
            "from here. Replay it where the run is."
        )
    here: dict[str, Any] = {"ckpt": config.ckpt and config.ckpt.model_copy(update={"store": None})}
    if (directory / MODEL).is_dir():
        here["model"] = config.model.model_copy(update={"name": str(directory / MODEL)})
    return config.model_copy(update=here)


def _unpack(bundle: Path, folder: Path) -> Bundled:
    with zipfile.ZipFile(bundle) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if len(members) > _MOST_FILES or len(members) != len(archive.infolist()):
            raise UsageError(f"{bundle} has more than {_MOST_FILES} files, or one of them twice.")
        if INDEX not in members or members[INDEX].file_size > _MOST_INDEX_BYTES:
            raise UsageError(f"{bundle} is no bundle of `rl bundle`: it has no {INDEX}.")
        index = archive.read(INDEX)
        told = msgspec.json.decode(index, type=Bundled)
        if told.format != _FORMAT:
            raise UsageError(
                f"{bundle} has the format {told.format}; this version of Buckeye reads {_FORMAT}."
            )
        if sum(listed.bytes for listed in told.files.values()) > _MOST_BYTES:
            raise UsageError(f"{bundle} would take more than {human_bytes(_MOST_BYTES)}.")
        if set(members) != {INDEX, *told.files}:
            raise UsageError(f"{bundle} holds other files than its {INDEX} says.")
        for name, listed in told.files.items():
            _check_name(bundle, name, members[name])
            _extract(archive, members[name], listed, folder / name)
    write_file(folder / INDEX, index)
    return told


def _check_name(bundle: Path, name: str, member: zipfile.ZipInfo) -> None:
    path, kind = PurePosixPath(name), stat.S_IFMT(member.external_attr >> 16)
    plain = str(path) == name and not path.is_absolute() and not {"..", "."} & set(path.parts)
    known = name in _FILES or (len(path.parts) > 1 and path.parts[0] in _FOLDERS)
    if not (plain and known) or set(name) & {"\\", "\0", ":"} or path.suffix not in _SUFFIXES:
        raise UsageError(f"{bundle} holds {name!r}, which is no file of a bundle. Nothing of it was read.")
    if kind not in (0, stat.S_IFREG):
        raise UsageError(f"{bundle} holds {name!r}, which is a link or a device. Nothing of it was read.")


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, listed: _Listed, path: Path) -> None:
    """Write one file, of the size and the content that the index says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), listed.bytes
    with archive.open(member) as source, path.open("xb") as file:
        while left >= 0 and (part := source.read(min(_PART, left + 1))):
            file.write(part)
            digest.update(part)
            left -= len(part)
    if left != 0 or digest.hexdigest() != listed.sha256:
        raise UsageError(f"{member.filename} in the bundle is not the file that was put into it.")
