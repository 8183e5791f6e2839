"""`buckeye env build` and `buckeye env push`: build and push the image of an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from buckeye.base.columns import counted, quoted
from buckeye.base.terminal import confirm, status_line
from buckeye.errors import UsageError

_FOLDER = typer.Argument(metavar="DIR", help="Folder of the environment.")
_JSON = typer.Option("--json", help="Print one JSON object.")
_QUIET = typer.Option("--quiet", "-q", help="Print only errors.")


def env_build(
    folder: Annotated[Path, _FOLDER] = Path("."),
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:TAG", help="Name of the image. Default: from the lock file, or the project."
        ),
    ] = None,
    builder: Annotated[
        Literal["auto", "docker", "podman", "buildah"],
        typer.Option(help="Program that builds the image. buildah needs no daemon."),
    ] = "auto",
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Build the image of a folder, start it once, and write its tools to buckeye.lock.yaml."""
    from buckeye.base.process import die_with_parent
    from buckeye.cli.env_options import print_table
    from buckeye.setup.environment_image import build_environment

    die_with_parent()
    with status_line("building", quiet=quiet or as_json) as show:
        built = build_environment(folder, tag, builder, show)
    if as_json:
        result = {
            "image": built.image,
            "digest": built.digest or None,
            "tools": [tool.name for tool in built.tools],
            "start_seconds": built.start_seconds,
            "lock_file": str(built.lock_file),
        }
        typer.echo(json.dumps(result))
    elif not quiet:
        digest = f" ({built.digest[:19]})" if built.digest else ""
        typer.echo(
            f"{built.image}{digest}: {counted(len(built.tools), 'tool')}, starts in {built.start_seconds:g} s"
        )
        rows = [(tool.name, tool.description.strip().partition("\n")[0]) for tool in built.tools]
        print_table(("tool", "description"), rows)
        typer.echo(f"{built.lock_file}: written")
        push = "buckeye env push" if folder == Path() else f"buckeye env push {quoted(folder)}"
        typer.echo(f"Next: buckeye rl init {quoted(folder)}   or publish it: {push} --image IMAGE")


def env_push(
    folder: Annotated[Path, _FOLDER] = Path("."),
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Target, such as ghcr.io/my-org/my-env:1. Default: from the lock file."
        ),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Push the built image to a registry, and write its digest to buckeye.lock.yaml.

    Uses the logins of `docker login`.
    """
    from buckeye.base.process import die_with_parent
    from buckeye.setup.environment_image import push_environment

    die_with_parent()
    with status_line("pushing", quiet=quiet or as_json) as show:
        target, digest = push_environment(folder, image, show)
    if as_json:
        typer.echo(json.dumps({"image": target, "digest": digest or None}))
    elif not quiet:
        typer.echo(f"{target}: pushed" + (f", {digest}" if digest else ""))


def push_if_needed(images: Sequence[str], *, is_interactive: bool, yes: bool) -> None:
    """Push the image that the tasks use if this folder built it and did not push it since.

    Another machine can pull the image only from a registry. Raises UsageError if the user declines the push,
    or if the name of an image has no registry.
    """
    from buckeye.mcp.tasks.lock_file import find_lock

    lock = find_lock(Path())
    for image in images:
        if "/" not in image:
            raise UsageError(
                f"another machine cannot pull the image {image} of the tasks: its name has no registry",
                code="BK-IMAGE",
                hint="Push it under another name, and put that name into the tasks (Mcp-Image)\n"
                f"  buckeye env push --image REGISTRY/ORG/{image}",
            )
        if lock is None or not lock.has_unpushed(image):
            continue
        if not yes and not (
            is_interactive and confirm(f"\n{image} was not pushed since its last build. Push it?")
        ):
            message = f"the image {image} was not pushed since its last build"
            raise UsageError(message, code="BK-IMAGE", hint="Push it: `buckeye env push`")
        env_push()
