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
from buckeye.base.prime_account import prime_account
from buckeye.cli.env_options import print_table
from buckeye.errors import RemoteError, UsageError
from buckeye.launch.preflight.devices import parse_gpu_spec
from buckeye.remote.base import RemoteRequest
from buckeye.remote.connection import parse_target
from buckeye.remote.control import terminal_command
from buckeye.remote.inventory import OpenPod, end_open_pod, find_pod, list_open_pods
from buckeye.remote.job import terminal_argv
from buckeye.remote.ledger import Ledger, PodEntry, hours_text
from buckeye.remote.offers import find_offers, left_out_text, offer_table
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.teardown import cost_text
from buckeye.run_files.known_runs import find_run, is_remote

_Pod = Annotated[str, typer.Argument(metavar="POD", help="Name or id of a pod, or its run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def list_pods(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also list ended pods.")] = False,
    as_json: _Json = False,
) -> None:
    """List the rented pods with hours and cost."""
    ledger, now = Ledger(), time.time()
    with PrimeProvider(prime_account()) as provider:
        pods = list_open_pods(provider, ledger)
    over = [entry for entry in ledger.entries() if entry.ended is not None] if ended else []
    if as_json:
        records = [_pod_record(pod, now) for pod in pods] + [_entry_record(entry, now) for entry in over]
        typer.echo(json.dumps(records))
        return
    rows = [_row(pod.entry, pod.state, pod.care, now) for pod in pods]
    rows += [_row(entry, "over", entry.outcome or "", now) for entry in over]
    if not rows:
        typer.echo("You have no pods.")
        return
    print_table(("POD", "ID", "GPUS", "STATE", "ENDED BY", "$/H", "FOR", "COST"), rows)
    if any(pod.care in ("nobody", "unknown") for pod in pods):
        typer.echo("To end the pods without a run: buckeye rl pods gc", err=True)


def offers(
    gpus: Annotated[str, typer.Argument(metavar="GPUS", help="Number and type, such as 4xH100.")],
    max_price: Annotated[float | None, typer.Option(min=0.0, help="Maximum price in US $ per hour.")] = None,
    region: Annotated[list[str] | None, typer.Option(help="Region, country or data center.")] = None,
    disk_gb: Annotated[int, typer.Option(min=1, help="Disk size in GB.")] = 100,
    as_json: _Json = False,
) -> None:
    """List the machines for rent, the cheapest first. Rents nothing."""
    request = RemoteRequest(gpus=parse_gpu_spec(gpus), max_price=max_price, region=tuple(region or ()))
    with PrimeProvider(prime_account()) as provider:
        matches, left_out = find_offers(provider, request, disk_gb=disk_gb)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(offer) for offer in matches]))
        return
    typer.echo(offer_table(matches, limit=len(matches)))
    if left_out:
        typer.echo(f"Left out: {left_out_text(left_out)}", err=True)


def attach(
    pod: _Pod,
    show: Annotated[bool, typer.Option("--print", help="Only print the ssh command.")] = False,
) -> None:
    """Open the terminal of a run on a pod or another host (tmux).

    Ctrl-B D detaches; Ctrl-C stops the run. Without a terminal, prints the ssh command.
    """
    argv = _run_argv(pod) or _pod_argv(pod)
    if show or not sys.stdout.isatty():
        typer.echo(shlex.join(argv))
        return
    try:
        os.execvp(argv[0], argv)  # noqa: S606  a list of args, without a shell
    except FileNotFoundError:
        hint = f"Install an ssh client. The command is: {shlex.join(argv)}"
        raise RemoteError("`ssh` is not installed", code="BK-PACKAGE-MISSING", hint=hint) from None


def terminate(pod: _Pod, yes: _Yes = False, as_json: _Json = False) -> None:
    """End a pod, and wait until the provider confirms it. Data that is only on its disk is lost."""
    with PrimeProvider(prime_account()) as provider:
        ledger = Ledger()
        open_pod = find_pod(list_open_pods(provider, ledger), pod)
        _confirm([open_pod], yes=yes, as_json=as_json)
        ended = end_open_pod(provider, ledger, open_pod, outcome="terminated", tell=_print_progress)
    _show_ended([ended], as_json)


def gc(
    yes: _Yes = False,
    others: Annotated[
        bool,
        typer.Option("--all", help="Also end pods that this machine did not rent."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """End the pods that no run uses, such as those of a killed command."""
    with PrimeProvider(prime_account()) as provider:
        ledger = Ledger()
        pods = list_open_pods(provider, ledger)
        orphaned = [pod for pod in pods if pod.care == "nobody" or (others and pod.care == "unknown")]
        orphaned += [pod for pod in pods if pod.care == "kept" and not pod.may_cost]
        if any(pod.may_cost for pod in orphaned):
            _confirm([pod for pod in orphaned if pod.may_cost], yes=yes, as_json=as_json)
        ended = [end_open_pod(provider, ledger, pod, outcome="gc", tell=_print_progress) for pod in orphaned]
    _show_ended(ended, as_json)
    unknown = [pod.entry.name for pod in pods if pod.care == "unknown"]
    if unknown and not others:
        typer.echo(
            f"{counted(len(unknown), 'pod')} not rented by this machine: {', '.join(unknown)}. "
            "To end them too, add --all",
            err=True,
        )


def _confirm(pods: Sequence[OpenPod], *, yes: bool, as_json: bool) -> None:
    """Show the pods to end, and ask for confirmation. Raises UsageError if stdin is not a terminal."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            "ending pods needs a confirmation, and stdin is not a terminal",
            code="BK-CLI-CONFIRM",
            hint="Pass --yes; `buckeye rl pods list` shows the pods",
        )
    now = time.time()
    print_table(
        ("POD", "ID", "GPUS", "STATE", "ENDED BY", "$/H", "FOR", "COST"),
        [_row(pod.entry, pod.state, pod.care, now) for pod in pods],
    )
    if any(pod.care == "run" for pod in pods):
        typer.echo("warning: a run is active and will fail")
    if not typer.confirm(f"End {counted(len(pods), 'pod')}?"):
        typer.echo("No pod was ended.")
        raise typer.Exit


def _run_argv(name: str) -> list[str] | None:
    """Return the ssh command of a remote run, or None if `name` does not name one."""
    try:
        run = find_run(name)
    except UsageError:
        return None
    return terminal_command(run) if is_remote(run) else None


def _pod_argv(name: str) -> list[str]:
    ledger = Ledger()
    with PrimeProvider(prime_account()) as provider:
        pod = find_pod(list_open_pods(provider, ledger), name)
    if not pod.ssh:
        message = f"pod {pod.entry.name} is {pod.state} and has no ssh address yet"
        raise RemoteError(message, code="BK-REMOTE-CONNECTION", hint="Retry when it is ready")
    hosts = str(ledger.known_hosts(pod.entry.name))
    return terminal_argv(parse_target(pod.ssh[0]), pod.entry.identity_file, hosts, pod.entry.run_id)


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


def _pod_record(pod: OpenPod, now: float) -> dict[str, Any]:
    return {**_entry_record(pod.entry, now), "state": pod.state, "care": pod.care, "ssh": list(pod.ssh)}


def _entry_record(entry: PodEntry, now: float) -> dict[str, Any]:
    return {"state": "over", **dataclasses.asdict(entry), "hours": entry.hours(now), "cost": entry.cost(now)}


def _show_ended(ended: Sequence[PodEntry], as_json: bool) -> None:
    now = time.time()
    if as_json:
        typer.echo(json.dumps([_entry_record(entry, now) for entry in ended]))
        return
    for entry in ended:
        typer.echo(cost_text(entry, now))
    typer.echo(f"{counted(len(ended), 'pod')} ended." if ended else "No pods to end.")


def _print_progress(text: str) -> None:
    typer.echo(text, err=True)
