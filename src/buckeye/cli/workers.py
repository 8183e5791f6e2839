"""The command `buckeye workers`."""

from __future__ import annotations

from typing import Annotated

import typer


def workers(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8770,
) -> None:
    """Start workers of environments for a run that is led on another node."""
    from buckeye.launch.worker_hosts import serve

    serve(host, port)
