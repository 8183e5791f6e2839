"""Build and push the image of an environment, and update its lock file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.errors import UsageError
from buckeye.mcp.tasks.lock_file import (
    LOCK_FILE,
    VERSION,
    ImageName,
    ToolEntry,
    find_lock,
    parse_image,
    update_lock,
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltEnvironment:
    """Image that was built and started once. `digest` is "" if only a push makes it known."""

    image: str
    digest: str
    tools: Sequence[ToolEntry]
    start_seconds: float
    lock_file: Path


def build_environment(folder: Path, tag: str | None, builder: str, progress: Progress) -> BuiltEnvironment:
    """Build the image of a folder, start it, list its tools, and record the result in the lock file.

    If the image does not start, the lock file is not changed. Raises UsageError, PrepareError,
    RuntimeUnavailableError, McpEnvironmentError.
    """
    from buckeye.mcp.config import DefaultsConfig
    from buckeye.mcp.sandbox.build import build_image, choose_builder
    from buckeye.setup.init.environment_source import default_image_name, find_source
    from buckeye.setup.init.trial_server import timed_tools

    if not folder.is_dir():
        hint = "Name the folder of an environment; `buckeye env new NAME` creates one"
        raise UsageError(f"{folder} is not a folder", code="BK-FILE-NOT-FOUND", hint=hint)
    lock_file, lock = folder / LOCK_FILE, find_lock(folder)
    name = (
        _parse_image_name(tag)
        if tag is not None
        else lock.image_name
        if lock is not None
        else default_image_name(folder)
    )
    image = f"{name.name}:{name.tag or 'latest'}"
    builder_name = choose_builder(builder)
    progress(f"building {image} with {builder_name}")
    digest = build_image(folder, image, builder_name)
    progress(f"starting {image}")
    source = find_source(image, command=None, headers={})
    tools, seconds = asyncio.run(timed_tools(source, DefaultsConfig().setup_timeout))
    is_unchanged = lock is not None and bool(digest) and lock.image_name.digest == digest
    changes = {
        "version": VERSION,
        "image": image,
        "digest": digest or None,
        "tools": [tool.model_dump(exclude_defaults=True) for tool in tools],
        "start_seconds": round(seconds, 2),
        "built_at": _now(),
    }
    update_lock(lock_file, changes if is_unchanged else {**changes, "pushed_at": None})
    return BuiltEnvironment(image, digest, tools, round(seconds, 2), lock_file)


def push_environment(folder: Path, image: str | None, progress: Progress) -> tuple[str, str]:
    """Push the built image of a folder, under the name `image` if given.

    Writes name and digest to the lock file, and returns them. Raises UsageError and PrepareError.
    """
    from buckeye.mcp.sandbox.build import push_image

    lock_file, lock = folder / LOCK_FILE, find_lock(folder)
    if lock is None:
        hint = f"Build the image first: `buckeye env build {quoted(folder)}`"
        raise UsageError(f"{lock_file} does not exist", code="BK-FILE-NOT-FOUND", hint=hint)
    built = lock.image_name.tagged
    name = _parse_image_name(image) if image is not None else lock.image_name
    target = f"{name.name}:{name.tag or 'latest'}"
    digest = push_image(built, target, progress=progress)
    update_lock(lock_file, {"image": target, "digest": digest or None, "pushed_at": _now()})
    return target, digest


def _parse_image_name(text: str) -> ImageName:
    name = parse_image(text)
    if name is None or name.digest:
        hint = "Write it as my-org/my-env:latest"
        raise UsageError(f"{text!r} is not the name of an image", code="BK-CLI-ARGUMENT", hint=hint)
    return name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
