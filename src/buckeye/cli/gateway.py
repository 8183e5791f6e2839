"""`buckeye gateway`: environments behind one MCP URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from buckeye.errors import UsageError
from buckeye.mcp.gateway.settings import split_command

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.I)


_Host = Annotated[str, typer.Option(help="Address to listen on; one that others reach needs a key.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
_Image = Annotated[str | None, typer.Option(help="Image for sessions without an Mcp-Image header.")]
_Command = Annotated[
    str | None, typer.Option(help="Serve all sessions with this program, an MCP server on stdio.")
]
_Folder = Annotated[
    Path | None, typer.Option("--dir", help="Serve all sessions with the server of this Python project.")
]
_Files = Annotated[
    Path | None, typer.Option(help="What a session's folder begins with: a folder, an archive, a file.")
]
_Runtime = Annotated[str, typer.Option(help="What runs images: auto, docker, podman, apptainer or chroot.")]
_Sessions = Annotated[int, typer.Option(min=1, help="Environments that run at once; more sessions wait.")]
_QueueSeconds = Annotated[float, typer.Option(min=0, help="How long a session waits for its turn.")]
_StartSeconds = Annotated[
    float, typer.Option(min=0.1, help="How long an environment may take to answer first.")
]
_IdleSeconds = Annotated[
    float, typer.Option(min=0.1, help="A session that asks nothing for so long is ended.")
]
_LeftSeconds = Annotated[
    float, typer.Option(min=0.1, help="A session whose client closed its stream so long ago is ended.")
]
_SessionSeconds = Annotated[float, typer.Option(min=0.1, help="Longest life of a session.")]
_Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Most memory of an environment, as 2g.")]
_Processes = Annotated[
    int, typer.Option(min=1, help="Most processes and threads of an environment at a time.")
]
_Disk = Annotated[
    str, typer.Option(metavar="SIZE", help="Most that the files of an environment take, as 4g.")
]
_Cpus = Annotated[float | None, typer.Option(min=0.01, help="Processors of a container.")]
_Variable = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A variable that clients may set for a server, with Env-NAME."),
]
_NoKey = Annotated[bool, typer.Option("--no-key", help="Ask for no key; else one is made where none is set.")]
_AllowHost = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A further name that clients reach it by.")
]
_AllowOrigin = Annotated[list[str] | None, typer.Option(metavar="URL", help="A web page that may use it.")]
_Preload = Annotated[
    bool, typer.Option(help="Import the libraries of a Python server once, and fork its sessions.")
]
_Network = Annotated[bool, typer.Option(help="Whether environments reach the network.")]


def gateway(
    host: _Host = "127.0.0.1",
    port: _Port = 8765,
    image: _Image = None,
    command: _Command = None,
    folder: _Folder = None,
    files: _Files = None,
    runtime: _Runtime = "auto",
    sessions: _Sessions = 64,
    queue_seconds: _QueueSeconds = 120.0,
    start_seconds: _StartSeconds = 60.0,
    idle_seconds: _IdleSeconds = 600.0,
    left_seconds: _LeftSeconds = 60.0,
    session_seconds: _SessionSeconds = 7200.0,
    memory: _Memory = None,
    processes: _Processes = 1024,
    disk: _Disk = "4g",
    cpus: _Cpus = None,
    variable: _Variable = None,
    no_key: _NoKey = False,
    allow_host: _AllowHost = None,
    allow_origin: _AllowOrigin = None,
    preload: _Preload = True,
    network: _Network = True,
) -> None:
    """Serve MCP environments on one address; every session gets an environment of its own."""
    from buckeye.base import heartbeat
    from buckeye.base.keys import variables
    from buckeye.base.process import die_with_parent, forbid_tracing
    from buckeye.mcp.gateway.serve import run_gateway
    from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, GatewaySettings
    from buckeye.mcp.sandbox.container_runtimes import IMAGE_RUNTIMES
    from buckeye.mcp.sandbox.runtime import SandboxLimits
    from buckeye.monitor.log import setup_logging

    die_with_parent()
    forbid_tracing()
    heartbeat.start()
    _check_together(image, command, folder, files)
    if runtime not in ("auto", *IMAGE_RUNTIMES):
        raise UsageError(f"--runtime {runtime}: choose auto, {', '.join(IMAGE_RUNTIMES)}.")
    api_key = variables().get(API_KEY_VARIABLE) or None
    if api_key is not None and no_key:
        raise UsageError(f"--no-key is said, and {API_KEY_VARIABLE} is set: unset it, or leave --no-key out.")
    settings = GatewaySettings(
        host=host,
        port=port,
        api_key=api_key,
        no_key=no_key,
        variables=frozenset(variable or ()),
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        image=image or "",
        sessions=sessions,
        queue_seconds=queue_seconds,
        start_seconds=start_seconds,
        idle_seconds=idle_seconds,
        left_seconds=left_seconds,
        session_seconds=session_seconds,
        disk=_bytes(disk, "--disk") or 0,
        preload=preload,
    )
    setup_logging("info", "gateway", None)
    most = _bytes(memory, "--memory")
    limits = SandboxLimits(memory=most, cpus=cpus, network=network, processes=processes, disk=settings.disk)
    words = split_command(command) if command is not None else None
    run_gateway(settings, limits, runtime=runtime, command=words, folder=folder, files=files)


def _check_together(image: str | None, command: str | None, folder: Path | None, files: Path | None) -> None:
    given = [name for name, value in (("--image", image), ("--command", command), ("--dir", folder)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: choose one of them.")
    if files is not None and not command:
        raise UsageError("--files is for --command: an image and a project bring their own.")


def _bytes(size: str | None, flag: str) -> int | None:
    if size is None:
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{flag} {size}: write a number and a unit, as 512m or 2g.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


COMMANDS = {"gateway": gateway}
