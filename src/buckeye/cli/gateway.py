"""`buckeye gateway`: serve MCP environments at one address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from buckeye.errors import UsageError
from buckeye.mcp.gateway.settings import split_command

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.I)


_Host = Annotated[
    str, typer.Option(help="Address to listen on. An address that is not local requires a key.")
]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")]
_Image = Annotated[str | None, typer.Option(help="Image for sessions without an Mcp-Image header.")]
_Command = Annotated[str | None, typer.Option(help="Program for all sessions, an MCP server on stdio.")]
_Folder = Annotated[
    Path | None, typer.Option("--dir", help="Python project with the server for all sessions.")
]
_Files = Annotated[
    Path | None, typer.Option(help="Initial content of a session's folder: a folder, archive or file.")
]
_Runtime = Annotated[
    Literal["auto", "docker", "podman", "apptainer", "chroot"], typer.Option(help="Runtime of images.")
]
_Sessions = Annotated[
    int, typer.Option(min=1, help="Maximum number of parallel sessions; further sessions wait.")
]
_QueueSeconds = Annotated[float, typer.Option(min=0, help="Seconds that a session may wait for a slot.")]
_StartSeconds = Annotated[
    float, typer.Option(min=0.1, help="Timeout of the start of an environment, in seconds.")
]
_IdleSeconds = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a request after which a session ends.")
]
_LeftSeconds = Annotated[
    float, typer.Option(min=0.1, help="Seconds after a disconnect of the client after which a session ends.")
]
_SessionSeconds = Annotated[float, typer.Option(min=0.1, help="Maximum duration of a session, in seconds.")]
_Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory limit of an environment, such as 2g.")
]
_Processes = Annotated[int, typer.Option(min=1, help="Limit of processes and threads of an environment.")]
_Disk = Annotated[str, typer.Option(metavar="SIZE", help="Disk limit of an environment, such as 4g.")]
_Cpus = Annotated[float | None, typer.Option(min=0.01, help="CPU limit of a container, in cores.")]
_Variable = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Variable that clients may set with a header Env-NAME."),
]
_NoKey = Annotated[
    bool,
    typer.Option("--no-key", help="Require no key. Default: require BUCKEYE_API_KEY, or else a new key."),
]
_AllowHost = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Additional host name that clients may use.")
]
_AllowOrigin = Annotated[
    list[str] | None, typer.Option(metavar="URL", help="Web origin that may use the gateway.")
]
_Preload = Annotated[
    bool, typer.Option(help="Import the libraries of a Python server once, and fork each session.")
]
_Network = Annotated[bool, typer.Option(help="Give environments access to the network.")]


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
    """Serve MCP environments at one address; every session gets a separate environment."""
    from buckeye.base import heartbeat
    from buckeye.base.keys import variables
    from buckeye.base.process import die_with_parent, forbid_tracing
    from buckeye.mcp.gateway.serve import run_gateway
    from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, GatewaySettings
    from buckeye.mcp.sandbox.runtime import SandboxLimits
    from buckeye.monitor.log import setup_logging

    die_with_parent()
    forbid_tracing()
    heartbeat.start()
    _check_flags(image, command, folder, files)
    api_key = variables().get(API_KEY_VARIABLE) or None
    if api_key is not None and no_key:
        hint = f"Leave --no-key out, or unset {API_KEY_VARIABLE}"
        raise UsageError(f"--no-key: {API_KEY_VARIABLE} is set", code="BK-CLI-CONFLICT", hint=hint)
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
        disk=_parse_size(disk, "--disk") or 0,
        preload=preload,
    )
    setup_logging("info", "gateway", None)
    limits = SandboxLimits(
        memory=_parse_size(memory, "--memory"),
        cpus=cpus,
        network=network,
        processes=processes,
        disk=settings.disk,
    )
    argv = split_command(command) if command is not None else None
    run_gateway(settings, limits, runtime=runtime, command=argv, folder=folder, files=files)


def _check_flags(image: str | None, command: str | None, folder: Path | None, files: Path | None) -> None:
    given = [name for name, value in (("--image", image), ("--command", command), ("--dir", folder)) if value]
    if len(given) > 1:
        message = f"{' and '.join(given)} exclude each other"
        raise UsageError(message, code="BK-CLI-CONFLICT", hint="Choose one of them")
    if files is not None and not command:
        hint = "Add --command, or leave --files out: an image and a project contain their files"
        raise UsageError("--files: needs --command", code="BK-CLI-CONFLICT", hint=hint)


def _parse_size(size: str | None, flag: str) -> int | None:
    if size is None:
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None or float(match[1]) == 0:
        hint = "Write a number and a unit, such as 512m or 2g"
        raise UsageError(f"{flag}: {size!r} is not a size", code="BK-CLI-ARGUMENT", hint=hint)
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
