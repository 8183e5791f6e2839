"""List the pods that have not ended, from the ledger and from the provider, and end a pod."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from buckeye.errors import UsageError
from buckeye.remote.base import NAME_PREFIX, Pod, PodState
from buckeye.remote.ledger import Ledger, PodEntry
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.teardown import end_pod

Care = Literal["run", "kept", "nobody", "unknown"]
"""Party that must end a pod.

- `run`: the local process that supervises the run on the pod ends the pod.
- `kept`: the user started the run with `--keep`, and ends the pod.
- `nobody`: the supervising process has ended, so the user must end the pod.
- `unknown`: the pod is not in the ledger, so it may belong to another user.
"""

_SHORTEST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPod:
    """A pod that has not ended as far as the ledger shows. `state` and `ssh` come from the provider."""

    entry: PodEntry
    care: Care
    state: PodState | Literal["never made"]
    ssh: tuple[str, ...] = ()

    @property
    def may_cost(self) -> bool:
        """True if the pod may still cost money."""
        return self.state not in ("gone", "never made")


def list_open_pods(provider: PrimeProvider, ledger: Ledger) -> list[OpenPod]:
    """Return every pod in the ledger or at the provider that has not ended.

    Raises RemoteError if the provider does not respond.
    """
    there = provider.pods()
    entries = [e for e in ledger.entries() if e.ended is None and e.provider == provider.name]
    known = {entry.pod_id for entry in entries} | {entry.name for entry in entries}
    seen = [_seen(provider, ledger, entry, there) for entry in entries]
    unknown_pods = [pod for pod in there if pod.id not in known and pod.name not in known]
    for pod in unknown_pods:
        status = provider.status(pod.id)
        entry = _entry_of(pod, provider.name, status.price_per_hour)
        seen.append(OpenPod(entry=entry, care="unknown", state=status.state, ssh=tuple(map(str, status.ssh))))
    return seen


def find_pod(pods: Sequence[OpenPod], word: str) -> OpenPod:
    """Return the pod with the name `word`, or whose id or run id begins with `word`.

    Raises UsageError if no pod or several pods match.
    """
    matches = [pod for pod in pods if pod.entry.name == word]
    if not matches and len(word) >= _SHORTEST:
        matches = [
            pod
            for pod in pods
            if (pod.entry.pod_id or "").startswith(word) or pod.entry.run_id.startswith(word)
        ]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(pod.entry.name for pod in matches or pods)
    if matches:
        raise UsageError(
            f"{word} matches {len(matches)} pods: {names}", code="BK-POD-NOT-FOUND", hint="name one of them"
        )
    known = f"your pods: {names}" if names else "you have no pods"
    raise UsageError(f"no pod is named {word}", code="BK-POD-NOT-FOUND", hint=known)


def end_open_pod(
    provider: PrimeProvider,
    ledger: Ledger,
    pod: OpenPod,
    *,
    outcome: str,
    tell: Callable[[str], None],
) -> PodEntry:
    """End a pod, or record that it has already ended.

    Raises RemoteError if the end is not confirmed. Raises KeyboardInterrupt if Ctrl-C was pressed, also if
    the pod has ended.
    """
    if not pod.may_cost:
        return ledger.end(pod.entry, outcome=pod.state)
    entry, is_interrupted = end_pod(provider, ledger, pod.entry, outcome=outcome, tell=tell)
    if is_interrupted:
        raise KeyboardInterrupt
    return entry


def _seen(provider: PrimeProvider, ledger: Ledger, entry: PodEntry, there: Sequence[Pod]) -> OpenPod:
    care: Care = "run" if ledger.is_supervised(entry.name) else "kept" if entry.keep else "nobody"
    pod_id = entry.pod_id or next((pod.id for pod in there if pod.name == entry.name), None)
    if pod_id is None:
        # while the process that placed the order is alive, the order may still create the pod
        return OpenPod(entry=entry, care=care, state="starting" if care == "run" else "never made")
    status = provider.status(pod_id)
    entry = dataclasses.replace(entry, pod_id=pod_id)
    return OpenPod(entry=entry, care=care, state=status.state, ssh=tuple(map(str, status.ssh)) or entry.ssh)


def _entry_of(pod: Pod, provider: str, price: float | None) -> PodEntry:
    """Return an entry for a pod that is not in the ledger, from the data of the provider."""
    return PodEntry(
        name=pod.name,
        run_id=pod.name.removeprefix(NAME_PREFIX).partition("-")[0],
        provider=provider,
        gpus=pod.gpus or "?",
        price_per_hour=pod.price_per_hour if pod.price_per_hour is not None else price or 0.0,
        ordered=pod.created if pod.created is not None else time.time(),
        pod_id=pod.id,
    )
