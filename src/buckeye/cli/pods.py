"""`buckeye rl pods list | offers | attach | terminate | gc`: rented machines, and offers to rent one."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from buckeye.base.columns import counted
from buckeye.cli.env_options import print_table
from buckeye.errors import RemoteError, UsageError
from buckeye.launch.preflight.devices import parse_gpu_spec
from buckeye.remote.base import Clock, GpuRequest, RemoteRequest
from buckeye.remote.connection import parse_target
from buckeye.remote.control import terminal_command
from buckeye.remote.inventory import OpenPod, end_open_pod, find_pod, list_open_pods
from buckeye.remote.ledger import Ledger, PodEntry, hours_text
from buckeye.remote.offers import find_offers, left_out_text, offer_table
from buckeye.remote.providers.choose import open_provider
from buckeye.remote.teardown import cost_text
from buckeye.run_files.known_runs import find_run, is_remote

_PROVIDER = "prime"  # the only provider with rented machines
_Pod = Annotated[str, typer.Argument(metavar="POD", help="Its name, its id, or its run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def list_pods(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    as_json: _Json = False,
) -> None:
    """The pods there are, with hours and cost."""
    ledger, now = Ledger(), time.time()
    with open_provider(_PROVIDER) as provider:
        pods = list_open_pods(provider, ledger, now)
    over = [entry for entry in ledger.entries() if entry.ended is not None] if ended else []
    if as_json:
        typer.echo(json.dumps([_record(pod, now) for pod in pods] + [_over(entry, now) for entry in over]))
        return
    rows = [_row(pod.entry, pod.state, pod.care, now) for pod in pods]
    rows += [_row(entry, "over", entry.outcome or "", now) for entry in over]
    if not rows:
        typer.echo("No pod is rented.")
        return
    print_table(("POD", "ID", "GPUS", "STATE", "ENDED BY", "$/H", "FOR", "COST"), rows)
    if any(pod.care in ("nobody", "unknown") for pod in pods):
        typer.echo("`buckeye rl pods gc` ends those that nobody looks after.", err=True)


def offers(
    gpus: Annotated[str, typer.Argument(metavar="GPUS", help="As in 4xH100.")],
    max_price: Annotated[float | None, typer.Option(min=0.0, help="Dollars an hour.")] = None,
    region: Annotated[list[str] | None, typer.Option(help="A region, country or data centre.")] = None,
    disk_gb: Annotated[int, typer.Option(min=1, help="Disk, in GB.")] = 100,
    as_json: _Json = False,
) -> None:
    """What could be rented now, the cheapest first. Nothing is."""
    found = parse_gpu_spec(gpus)
    request = RemoteRequest(
        gpus=GpuRequest(count=found.count, type=found.type), max_price=max_price, regions=tuple(region or ())
    )
    with open_provider(_PROVIDER) as provider:
        fitting = find_offers(provider, request, disk_gb=disk_gb)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(offer) for offer in fitting.offers]))
        return
    typer.echo(offer_table(fitting.offers, limit=len(fitting.offers)))
    if fitting.left_out:
        typer.echo(f"Left out: {left_out_text(fitting.left_out)}", err=True)


def attach(
    pod: _Pod,
    show: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
) -> None:
    """Open the terminal of a run on a pod or on another host (tmux). Ctrl-B D leaves it; Ctrl-C stops the
    run. Without a terminal the command is printed."""
    argv = _argv_of_run(pod) or _argv_of_pod(pod)
    if show or not sys.stdout.isatty():
        typer.echo(shlex.join(argv))
        return
    try:
        os.execvp(argv[0], argv)  # noqa: S606  a list of args, without a shell
    except FileNotFoundError:
        raise RemoteError(f"There is no program ssh here. It would be: {shlex.join(argv)}") from None


def terminate(pod: _Pod, yes: _Yes = False, as_json: _Json = False) -> None:
    """End a pod, and wait until that is confirmed. What is only on its disk is lost."""
    with open_provider(_PROVIDER) as provider:
        ledger = Ledger()
        seen = find_pod(list_open_pods(provider, ledger, time.time()), pod)
        _confirm([seen], yes=yes, as_json=as_json)
        ended = end_open_pod(provider, ledger, seen, outcome="terminated", clock=Clock(), tell=_tell)
    _show_ended([ended], as_json)


def gc(
    yes: _Yes = False,
    others: Annotated[
        bool,
        typer.Option("--all", help="Also pods that only the provider knows; they may be somebody else's."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """End the pods that nobody looks after: of runs that were killed, or of a machine that was lost."""
    with open_provider(_PROVIDER) as provider:
        ledger = Ledger()
        pods = list_open_pods(provider, ledger, time.time())
        left = [pod for pod in pods if pod.care == "nobody" or (others and pod.care == "unknown")]
        left += [pod for pod in pods if pod.care == "kept" and not pod.may_cost]
        if any(pod.may_cost for pod in left):
            _confirm([pod for pod in left if pod.may_cost], yes=yes, as_json=as_json)
        ended = [end_open_pod(provider, ledger, p, outcome="gc", clock=Clock(), tell=_tell) for p in left]
    _show_ended(ended, as_json)
    strangers = [pod.entry.name for pod in pods if pod.care == "unknown"]
    if strangers and not others:
        typer.echo(
            f"{len(strangers)} more are not known here, and stay: {', '.join(strangers)}. They may be "
            "somebody else's; --all ends them too.",
            err=True,
        )


def _confirm(pods: Sequence[OpenPod], *, yes: bool, as_json: bool) -> None:
    """Show the pods that would be ended, and ask. Raises UsageError without a terminal."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise UsageError("nobody can be asked here; add --yes to end them (`list` shows them)")
    now = time.time()
    print_table(
        ("POD", "ID", "GPUS", "STATE", "ENDED BY", "$/H", "FOR", "COST"),
        [_row(pod.entry, pod.state, pod.care, now) for pod in pods],
    )
    if any(pod.care == "run" for pod in pods):
        typer.echo("A run is on it, and will fail.")
    if not typer.confirm("End them?" if len(pods) > 1 else "End it?"):
        typer.echo("Nothing was ended.")
        raise typer.Exit


def _argv_of_run(name: str) -> list[str] | None:
    """Return the ssh command of a remote run, or None if `name` does not name one."""
    try:
        run = find_run(name)
    except UsageError:
        return None
    return terminal_command(run) if is_remote(run) else None


def _argv_of_pod(name: str) -> list[str]:
    ledger = Ledger()
    with open_provider(_PROVIDER) as provider:
        pod = find_pod(list_open_pods(provider, ledger, time.time()), name)
    if not pod.ssh:
        raise RemoteError(f"Pod {pod.entry.name} is {pod.state}: it has no address for ssh yet.")
    target = parse_target(pod.ssh[0])
    key = ["-i", pod.entry.identity_file] if pod.entry.identity_file else []
    hosts = f"UserKnownHostsFile={ledger.known_hosts(pod.entry.name)}"
    return [
        *("ssh", "-t", *key, "-p", str(target.port), "-o", hosts, "-o", "StrictHostKeyChecking=accept-new"),
        *(f"{target.user}@{target.host}", "tmux", "-L", f"buckeye-{pod.entry.run_id}", "attach"),
    ]


def _row(entry: PodEntry, state: str, care: str, now: float) -> tuple[str, ...]:
    return (
        entry.name,
        entry.pod_id or "?",
        entry.gpus,
        state,
        care,
        f"{entry.price_per_hour:.2f}",
        hours_text(entry.hours(now)),
        f"${entry.cost(now):.2f}",
    )


def _record(pod: OpenPod, now: float) -> dict[str, Any]:
    return {**_over(pod.entry, now), "state": pod.state, "care": pod.care, "ssh": list(pod.ssh)}


def _over(entry: PodEntry, now: float) -> dict[str, Any]:
    return {"state": "over", **dataclasses.asdict(entry), "hours": entry.hours(now), "cost": entry.cost(now)}


def _show_ended(ended: Sequence[PodEntry], as_json: bool) -> None:
    now = time.time()
    if as_json:
        typer.echo(json.dumps([_over(entry, now) for entry in ended]))
        return
    for entry in ended:
        typer.echo(cost_text(entry, now))
    typer.echo(f"{counted(len(ended), 'pod')} ended." if ended else "There is nothing to end.")


def _tell(text: str) -> None:
    typer.echo(text, err=True)


COMMANDS = {
    "rl pods list": list_pods,
    "rl pods offers": offers,
    "rl pods attach": attach,
    "rl pods terminate": terminate,
    "rl pods gc": gc,
}
