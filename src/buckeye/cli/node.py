"""`buckeye node`: make this host a node of a run that another one leads."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

_HEAD = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>\d{1,5})")


def node(
    head: Annotated[str, typer.Option(help="ADDRESS:PORT of the host where `rl` runs.")],
    key_file: Annotated[
        Path | None, typer.Option(help="The nodes' key; else the variable BUCKEYE_CLUSTER_KEY.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What messages call this host.")] = None,
    number: Annotated[int | None, typer.Option(min=1, help="Which node it is; any that is free.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Its address for the others; that which reaches the head.")
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="Seconds to try to join, and to join again.")] = 600,
) -> None:
    """Make this host a node of a run that another one leads (see docs/cluster.md)."""
    from buckeye import __version__
    from buckeye.cluster.agent import Host, Place, run_agent
    from buckeye.cluster.key import KEY_VARIABLE, read_key
    from buckeye.errors import UsageError
    from buckeye.monitor.log import setup_logging
    from buckeye.process import raise_open_files_limit
    from buckeye.run.machine import this_machine
    from buckeye.run.ports import held_ports

    match = _HEAD.fullmatch(head)
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"--head {head}: expected ADDRESS:PORT, as 10.0.0.1:29400")
    given = os.environ.pop(KEY_VARIABLE, "")
    if not given and key_file is None:
        raise UsageError(
            f"--key-file is missing, and {KEY_VARIABLE} is not set: the nodes of a run share a key"
        )
    setup_logging("info", "node", None)
    raise_open_files_limit()
    machine = this_machine()
    with held_ports() as ports:
        code = run_agent(
            Place(
                host=match["six"] or match["host"],
                port=int(match["port"]),
                key=lambda: given or read_key(key_file or Path()),
                name=name or socket.gethostname(),
                number=number,
                address=address,
                patience=patience,
            ),
            Host(version=__version__, cores=machine.cores, gpus=machine.gpus, choose_ports=ports.choose),
        )
    raise typer.Exit(code)
