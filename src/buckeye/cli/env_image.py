"""`buckeye env build` and `buckeye env push`: an environment as an image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.cli.waiting import status_line
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.tasks.lock import ToolEntry

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
    from buckeye.envs.runtimes.build import BUILDERS
    from buckeye.process import die_with_parent
    from buckeye.run.env_image import build_environment

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
        typer.echo(f"{built.image}{digest}: {len(built.tools)} tools, starts in {built.start_seconds:g} s")
        _print_tools(built.tools)
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
    from buckeye.process import die_with_parent
    from buckeye.run.env_image import push_environment

    die_with_parent()
    with status_line("pushing", quiet=quiet or as_json) as say:
        target, digest = push_environment(folder, image, say)
    if as_json:
        typer.echo(json.dumps({"image": target, "digest": digest or None}))
    elif not quiet:
        typer.echo(f"{target}: pushed" + (f", {digest}" if digest else ""))


def _print_tools(tools: Sequence[ToolEntry]) -> None:
    from buckeye.cli.tables import print_table

    print_table(("tool", "what it does"), [(tool.name, _first_line(tool.description)) for tool in tools])


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
