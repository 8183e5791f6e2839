"""Run a gateway process: listen on a port, report ready, and end all sessions on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from buckeye.base import heartbeat
from buckeye.base.http_server import http_server, listen
from buckeye.base.keys import generated_key, generated_key_file, make_hideable
from buckeye.mcp.gateway.app import create_app
from buckeye.mcp.gateway.gateway import Gateway
from buckeye.mcp.gateway.process_folder import is_in_use, open_process_folder
from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, GatewaySettings
from buckeye.mcp.sandbox.container_runtimes import ContainerRuntime, image_runtime
from buckeye.mcp.sandbox.process_runtimes import CommandRuntime, FolderRuntime
from buckeye.mcp.sandbox.runtime import Runtime, SandboxLimits, cache_folder
from buckeye.monitor.log import SUCCESS

log = logging.getLogger(__name__)

_STOP_SECONDS = 5


def run_gateway(
    settings: GatewaySettings,
    limits: SandboxLimits,
    *,
    runtime: str,
    command: Sequence[str] | None,
    folder: Path | None,
    files: Path | None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Raises BuckeyeError if the gateway cannot start.

    `runtime` is the name of the runtime for images, or `auto`. With `command` or `folder`, all sessions run
    the program of this command or folder instead of an image. With `command`, each session has a copy of
    `files`, which is a file or a folder.
    """
    listener = listen(settings.host, settings.port, change="Choose a --port.")
    make_hideable()
    with contextlib.ExitStack() as stack:
        if settings.api_key is None and not settings.no_key:
            port = listener.getsockname()[1]
            key = stack.enter_context(generated_key(API_KEY_VARIABLE, port))
            settings = replace(settings, api_key=key)
            path = shlex.quote(str(generated_key_file(API_KEY_VARIABLE, port)))
            log.info("Clients need the key of this gateway: export %s=$(cat %s)", API_KEY_VARIABLE, path)
        own_folder = stack.enter_context(open_process_folder(cache_folder() / "gateway"))
        selected: Runtime
        if folder is not None:
            selected = FolderRuntime(folder, limits)
        elif command is not None:
            selected = CommandRuntime(command, limits, files)
        else:
            selected = image_runtime(runtime, limits, own_folder)
        asyncio.run(_serve(settings, selected, own_folder, listener))


async def _serve(
    settings: GatewaySettings, runtime: Runtime, own_folder: Path, listener: socket.socket
) -> None:
    if settings.image or runtime.environment_flag:
        await runtime.prepare(settings.image)  # find errors before the first session
    if isinstance(runtime, ContainerRuntime):
        removed = await runtime.remove_leftovers(lambda name: is_in_use(own_folder.parent / name))
        if removed:
            log.info("Removed %d leaked containers of killed gateways", removed)
    gateway = Gateway(settings, runtime, own_folder)
    server = http_server(create_app(gateway), timeout_graceful_shutdown=_STOP_SECONDS)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log.log(SUCCESS, "Gateway ready on http://%s/mcp (%s: %s)", address, runtime.name, runtime.description)
    heartbeat.ready()
    stop_signal = asyncio.create_task(stopped.wait())
    await asyncio.wait({serving, stop_signal}, return_when=asyncio.FIRST_COMPLETED)
    stop_signal.cancel()
    log.info("Gateway stopping: ending %d sessions", gateway.status()["running"])
    await gateway.close()
    server.should_exit = True
    await serving
    log.info("Gateway stopped")
