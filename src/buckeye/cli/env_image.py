"""`buckeye env build` and `buckeye env push`: an environment as an image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.columns import counted
from buckeye.base.terminal import confirm, status_line
from buckeye.errors import UsageError

_FOLDER = typer.Argument(metavar="DIR", help="The environment's folder.")
_JSON = typer.Option("--json", help="Print one JSON object.")
_QUIET = typer.Option("--quiet", "-q", help="Print nothing but errors.")


def env_build(
    folder: Annotated[Path, _FOLDER] = Path("."),
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:TAG", help="The image's name. Default: the lock file's, or the project's."
        ),
    ] = None,
    builder: Annotated[
        str, typer.Option(help="auto, docker, podman or buildah, which needs no daemon.")
    ] = "auto",
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Build the image of a folder, start it once, and note its tools in buckeye.lock.yaml."""
    from buckeye.base.process import die_with_parent
    from buckeye.cli.env_options import print_table
    from buckeye.mcp.sandbox.build import BUILDERS
    from buckeye.setup.environment_image import build_environment

    die_with_parent()
    if builder not in ("auto", *BUILDERS):
        raise UsageError(f"--builder {builder}: choose auto, {', '.join(BUILDERS)}")
    with status_line("building", quiet=quiet or as_json) as say:
        built = build_environment(folder, tag, builder, say)
    if as_json:
        found = {
            "image": built.image,
            "digest": built.digest or None,
            "tools": [tool.name for tool in built.tools],
            "start_seconds": built.start_seconds,
            "lock_file": str(built.lock_file),
        }
        typer.echo(json.dumps(found))
    elif not quiet:
        digest = f" ({built.digest[:19]})" if built.digest else ""
        typer.echo(
            f"{built.image}{digest}: {counted(len(built.tools), 'tool')}, starts in {built.start_seconds:g} s"
        )
        rows = [(tool.name, tool.description.strip().partition("\n")[0]) for tool in built.tools]
        print_table(("tool", "what it does"), rows)
        typer.echo(f"{built.lock_file}: written")
        where = "" if folder == Path() else f" {folder}"
        typer.echo(f"Next: buckeye rl init {folder}   or to share it: buckeye env push{where} --image IMAGE")


def env_push(
    folder: Annotated[Path, _FOLDER] = Path("."),
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Where to, as ghcr.io/my-org/my-env:1. Default: the lock file's."),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Push what was built to a registry, and note its digest. Logins are those of `docker login`."""
    from buckeye.base.process import die_with_parent
    from buckeye.setup.environment_image import push_environment

    die_with_parent()
    with status_line("pushing", quiet=quiet or as_json) as say:
        target, digest = push_environment(folder, image, say)
    if as_json:
        typer.echo(json.dumps({"image": target, "digest": digest or None}))
    elif not quiet:
        typer.echo(f"{target}: pushed" + (f", {digest}" if digest else ""))


def push_if_needed(images: Sequence[str], *, is_interactive: bool, yes: bool) -> None:
    """Push the image of this folder's lock file if the tasks use it and it was not pushed since its build.

    Another machine can only get it from a registry. Raises UsageError if the user declines the push, or if
    the image's name has no registry.
    """
    from buckeye.mcp.tasks.lock_file import find_lock

    lock = find_lock(Path())
    for image in images:
        if "/" not in image:
            raise UsageError(
                f"the tasks act on the image {image}, whose name has no registry, so that another machine "
                "cannot get it. Push it under another name, and put that name into the tasks (Mcp-Image)\n"
                f"  buckeye env push --image REGISTRY/ORG/{image}"
            )
        if lock is None or not lock.has_unpushed(image):
            continue
        if not yes and not (
            is_interactive and confirm(f"\n{image} was built here and not pushed since. Push it?")
        ):
            raise UsageError(f"{image} was built here and not pushed since. Type\n  buckeye env push")
        env_push()


COMMANDS = {"env build": env_build, "env push": env_push}
