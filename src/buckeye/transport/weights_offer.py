"""Offer of weights that the trainer can broadcast from memory, and its acceptance by the orchestrator.

The trainer writes the offer to `broadcast/` in the run directory. To accept it, the orchestrator writes the
group, then deletes the offer. To withdraw it, the trainer deletes it, so exactly one of the two succeeds. The
members of the group meet in a third file. Names are random, and only this user can read the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.transport.weights import WeightsManifest

BROADCAST_FOLDER = "broadcast"
_MIN_SECONDS = 20.0
_MIN_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOffer:
    """Weights in the memory of the trainer on `host`. `sizes` are the bytes of each file.

    `shared` are the paths at which processes on `host` can open the files, or empty. `store` is the random
    name of the file in which the members of the group meet.
    """

    manifest: WeightsManifest
    sizes: dict[str, int]
    shared: dict[str, str]
    store: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedGroup:
    """Group for an offer: number of processes, and True if all are on the trainer's host."""

    size: int
    loopback: bool


def broadcast_seconds(sizes: Mapping[str, int]) -> float:
    """Return the maximum duration of a broadcast of files with these sizes in bytes."""
    return _MIN_SECONDS + sum(sizes.values()) / _MIN_BYTES_PER_SECOND


def store_path(run: Path, store: str) -> Path:
    """Return the path of the file in which the members of a group meet."""
    return run / BROADCAST_FOLDER / f"store_{store}"


def offer_weights(
    run: Path, manifest: WeightsManifest, sizes: dict[str, int], shared: dict[str, str]
) -> WeightsOffer:
    """Offer weights, and forget earlier offers and groups."""
    folder = run / BROADCAST_FOLDER
    clear_offers(run)
    folder.mkdir(mode=0o700, exist_ok=True)
    host = socket.gethostname()
    store = secrets.token_hex(16)
    offer = WeightsOffer(manifest=manifest, sizes=sizes, shared=shared, store=store, host=host)
    _write(_offer_path(run, offer.store), asdict(offer))
    return offer


def clear_offers(run: Path) -> None:
    """Delete the offers and groups of an earlier version or process."""
    storage.remove_directory(run / BROADCAST_FOLDER)


def find_offer(run: Path, *, identity: RunIdentity) -> WeightsOffer | None:
    """Return the offer of this attempt, or None."""
    for path in (run / BROADCAST_FOLDER).glob("offer_*.json"):
        try:
            offer = msgspec.convert(storage.read_json(path), WeightsOffer)
        except (OSError, ValueError):  # withdrawn
            continue
        if (offer.manifest.run_id, offer.manifest.attempt) == (identity.run_id, identity.attempt):
            return offer
    return None


def accept_offer(run: Path, offer: WeightsOffer, group: AcceptedGroup) -> bool:
    """Accept an offer for a group. Return False if it was withdrawn, or if the disk is full."""
    try:
        _write(_group_path(run, offer.store), asdict(group))
        _offer_path(run, offer.store).unlink()
    except OSError:
        return False
    return True


def withdraw_offer(run: Path, offer: WeightsOffer) -> bool:
    """Withdraw an offer. Return False if the orchestrator has accepted it."""
    try:
        _offer_path(run, offer.store).unlink()
    except FileNotFoundError:
        return False
    return True


def accepted_group(run: Path, offer: WeightsOffer) -> AcceptedGroup | None:
    """Return the group that the orchestrator has accepted for an offer, or None if it has not."""
    if _offer_path(run, offer.store).exists():
        return None
    return msgspec.convert(storage.read_json(_group_path(run, offer.store)), AcceptedGroup)


def _offer_path(run: Path, store: str) -> Path:
    return run / BROADCAST_FOLDER / f"offer_{store}.json"


def _group_path(run: Path, store: str) -> Path:
    return run / BROADCAST_FOLDER / f"group_{store}.json"


def _write(path: Path, content: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
