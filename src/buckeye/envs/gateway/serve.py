"""The gateway as a process: listens, says so, and ends everything when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from buckeye import beat
from buckeye.envs.gateway.app import create_app
from buckeye.envs.gateway.gateway import Gateway
from buckeye.envs.gateway.settings import GatewaySettings
from buckeye.envs.gateway.state import is_alive, own_folder
from buckeye.envs.runtimes.base import Limits, Places, Runtime, cache_folder
from buckeye.envs.runtimes.choose import ImageChoice, fixed_choice, image_runtime
from buckeye.envs.runtimes.containers import ContainerRuntime
from buckeye.errors import BuckeyeError
from buckeye.monitor.log import SUCCESS

log = logging.getLogger(__name__)

_STOP_SECONDS = 5


def run_gateway(
    settings: GatewaySettings,
    limits: Limits,
    *,
    runtime: str,
    command: Sequence[str] | None,
    folder: Path | None,
) -> None:
    """Serve until SIGTERM or SIGINT. `runtime` names the one for images, or is `auto`; `command` or `folder`
    serves all sessions instead. Raises BuckeyeError if it cannot start."""
    listener = _listen(settings.host, settings.port)
    with own_folder(cache_folder() / "gateway") as own:
        choose: Callable[[str], Runtime]
        if command is not None or folder is not None:
            choose = fixed_choice(command, folder, limits)
        else:
            choose = ImageChoice(image_runtime(runtime, limits, own))
        asyncio.run(_serve(settings, choose, own, listener))


async def _serve(
    settings: GatewaySettings, choose: Callable[[str], Runtime], own: Path, listener: socket.socket
) -> None:
    if settings.image or not isinstance(choose, ImageChoice):
        first = choose(settings.image)
        await first.prepare(settings.image)  # what cannot work is said now, and not to the first session
    used = choose.runtime if isinstance(choose, ImageChoice) else choose("")
    if isinstance(used, ContainerRuntime):
        removed = await used.remove_leftovers(lambda name: is_alive(own.parent / name))
        if removed:
            log.info("Removed %d containers of gateways that were killed", removed)
    gateway = Gateway(settings, choose, Places(own))
    server = _server(gateway)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.log(SUCCESS, "Gateway ready on http://%s:%d/mcp (%s: %s)", shown, port, used.name, used.about)
    beat.ready()
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    log.info("Stopping; %d sessions are ended", gateway.status()["running"])
    await gateway.close()
    server.should_exit = True
    await serving
    log.info("Gateway stopped")


def _server(gateway: Gateway) -> _Server:
    config = uvicorn.Config(
        create_app(gateway),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    return _Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise BuckeyeError(
            f"Cannot listen on {host}:{port} ({reason}): is another gateway running there? Choose a --port."
        ) from None
    return listener


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals are ours: the environments end first."""
        return contextlib.nullcontext()
