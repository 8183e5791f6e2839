"""Read and update the lock file `buckeye.lock.yaml`: the image of an environment, its tools and dataset."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from buckeye.base.storage import write_file
from buckeye.config.problems import Problem, config_error
from buckeye.config.settings import Layer, Location
from buckeye.config.shared import BaseConfig, conflict
from buckeye.config.validation import validate
from buckeye.config.yaml_source import read_yaml
from buckeye.errors import ConfigError

LOCK_FILE = "buckeye.lock.yaml"
VERSION = 1
NonEmpty = Annotated[str, Field(min_length=1)]


class ToolEntry(BaseConfig):
    """Tool of an environment, from the server's list of tools. The schemas are JSON Schema."""

    name: NonEmpty
    """Name of the tool."""
    description: str = ""
    """Description from the environment."""
    input_schema: dict[str, Any] | None = None
    """Schema of the parameters. None if unknown."""
    output_schema: dict[str, Any] | None = None
    """Schema of the structured result, if the server announces one."""
    annotations: dict[str, Any] = {}
    """Hints such as `readOnlyHint`."""


class PrimaryDataset(BaseConfig):
    """The dataset that `buckeye hf` wrote last."""

    name: NonEmpty
    """Name on the Hugging Face hub, or name of the folder."""
    task_count: NonNegativeInt
    """Number of tasks over all splits."""
    updated_at: str
    """Time of the last update in ISO format, such as 2026-01-31T12:00:00+00:00."""

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        _check_time("updated_at", self.updated_at)
        return self


class EnvironmentLock(BaseConfig):
    """Content of the lock file. Only `image` is required."""

    version: PositiveInt = VERSION
    """Version of the file format."""
    image: NonEmpty
    """Image reference `name:tag`, optionally with `@sha256:...`."""
    digest: str = ""
    """Digest of the image, if `image` does not contain it."""
    tools: list[ToolEntry] | None = None
    """Tools of the environment. None: not yet known."""
    start_seconds: NonNegativeFloat | None = None
    """Measured seconds to start the environment and list its tools."""
    built_at: str | None = None
    """Time when the image was built."""
    pushed_at: str | None = None
    """Time when the image was pushed to its registry."""
    primary_dataset: PrimaryDataset | None = None
    """Dataset with the tasks of the environment."""

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if parse_image(self.image) is None:
            raise conflict(
                f"is {self.image!r}; expected an image reference, such as my-org/my-env:latest", "image"
            )
        for field in ("built_at", "pushed_at"):
            _check_time(field, getattr(self, field))
        return self

    @property
    def image_name(self) -> ImageName:
        """Parsed image reference. The digest comes from `image` or `digest`."""
        name = parse_image(self.image)
        assert name is not None
        return replace(name, digest=name.digest or self.digest)

    def has_unpushed(self, image: str) -> bool:
        """Return True if `image` is the image of this file, and was built but not pushed since."""
        if self.image_name.tagged != image or self.built_at is None or self.pushed_at is None:
            return self.image_name.tagged == image and self.built_at is not None
        built, pushed = (datetime.fromisoformat(text) for text in (self.built_at, self.pushed_at))
        return built.timestamp() > pushed.timestamp()


def _check_time(field: str, text: str | None) -> None:
    try:
        datetime.fromisoformat(text or "2000-01-01")
    except ValueError:
        raise conflict(f"is {text!r}; expected a time, such as 2026-01-31T12:00:00+00:00", field) from None


def read_lock(path: Path) -> EnvironmentLock:
    """Load a lock file. Raises ConfigError with the file, line and key of every problem."""
    settings = read_yaml(path)
    version = settings.values.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"{path} has version {version} of a newer Buckeye; this Buckeye reads up to version {VERSION}",
            code="BK-PACKAGE-VERSION",
            hint="update Buckeye",
        )
    lock, problems = validate(EnvironmentLock, settings)
    if lock is None or problems:
        raise config_error(_locate(problem, path) for problem in problems)
    return lock


def find_lock(folder: Path) -> EnvironmentLock | None:
    """Return the lock file of a folder, or None if it has none. Raises ConfigError for an invalid file."""
    return read_lock(folder / LOCK_FILE) if (folder / LOCK_FILE).is_file() else None


def update_lock(path: Path, changes: Mapping[str, Any]) -> None:
    """Set top-level keys of a lock file atomically. Create the file if it does not exist.

    The value None removes a key. Other keys and comments stay unchanged. Raises ConfigError for an invalid
    file.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent  # its data lacks types, so only use the indentation

    text = "{}"
    if path.exists():
        read_lock(path)  # raises errors with their line
        text = path.read_text(encoding="utf-8-sig")
    _, indent, offset = load_yaml_guess_indent(text)
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    yaml.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
    document = yaml.load(text)
    document.fa.set_block_style()
    for key, value in changes.items():
        if value is None:
            document.pop(key, None)
        else:
            _set_key(document, key, value)
    written = io.StringIO()
    yaml.dump(document, written)
    EnvironmentLock.model_validate(_plain(document))
    write_file(path.resolve(), written.getvalue())


def _locate(problem: Problem, path: Path) -> Problem:
    return replace(problem, location=problem.location or Location(str(path), Layer.FILE))


def dataset_reference(name: str, task_count: int, now: datetime | None = None) -> dict[str, Any]:
    """Return a value for `primary_dataset`, with the current time or `now` in UTC."""
    at = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return PrimaryDataset(name=name, task_count=task_count, updated_at=at).model_dump()


def _set_key(table: Any, key: str, value: Any) -> None:
    """Set a key of a YAML table. Change an inner table key by key, so that its comments stay."""
    if isinstance(value, Mapping) and isinstance(table.get(key), Mapping):
        for inner, item in value.items():
            _set_key(table[key], inner, item)
    else:
        table[key] = value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value


_REFERENCE = re.compile(
    r"(?P<name>(?:[A-Za-z0-9][A-Za-z0-9.\-]*(?::\d+)?/)?[a-z0-9]+(?:(?:[./]|_{1,2}|-+)[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.\-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{6,64}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ImageName:
    """Image reference: `name` with its registry, `tag` and `digest` (`sha256:...`). "" if missing."""

    name: str
    tag: str = ""
    digest: str = ""

    @property
    def tagged(self) -> str:
        """Reference to show and to start the image: `name:tag`, or `name@digest` if it has no tag.

        The tag comes first, because a digest may exist only on this machine.
        """
        if self.tag:
            return f"{self.name}:{self.tag}"
        return f"{self.name}@{self.digest}" if self.digest else self.name

    @property
    def short(self) -> str:
        """Last part of the name, for names of files and jobs."""
        return self.name.rpartition("/")[2]


def parse_image(text: str) -> ImageName | None:
    """Return the parsed image reference, or None if it is invalid."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    return ImageName(match["name"], match["tag"] or "", match["digest"] or "")
