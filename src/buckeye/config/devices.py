"""How many replicas and ranks a run has: from the device ids, and the other way round."""

from __future__ import annotations

from typing import Any

from buckeye.config.problems import Problem
from buckeye.config.rl import RLConfig
from buckeye.config.settings import MISSING, KeyPath, Layer, Place, Settings, dotted

_INFERENCE_IDS: KeyPath = ("inference_gpu_ids",)
_TRAINER_IDS: KeyPath = ("trainer_gpu_ids",)
_DP: KeyPath = ("inference", "parallel", "dp")
_TP: KeyPath = ("inference", "parallel", "tp")
_WORKERS: KeyPath = ("orchestrator", "num_train_workers")
_MOST_DEVICES = 1024


def share_devices(settings: Settings) -> list[Problem]:
    """Make devices, replicas and ranks fit each other, in place; returns where two settings disagree.

    Values of a wrong type, and devices that cannot be shared out, are left to validation.
    """
    problems = []
    if isinstance(settings.get(("inference",)), dict):
        problems += _inference(settings)
    return problems + _trainer(settings)


def _inference(settings: Settings) -> list[Problem]:
    tp = settings.get(_TP)
    tp = 1 if tp is MISSING else tp
    ids, dp = settings.get(_INFERENCE_IDS), settings.get(_DP)
    if not _is_count(tp) or not (ids is MISSING or _are_ids(ids)) or not (dp is MISSING or _is_count(dp)):
        return []
    if ids is MISSING:
        count = tp * (1 if dp is MISSING else dp)
        place = settings.place(_DP) or settings.place(_TP)
        if place is not None and count <= _MOST_DEVICES:
            settings.put(_INFERENCE_IDS, list(range(count)), place)
        return []
    if len(ids) % tp:
        return []
    place = _place(settings, _INFERENCE_IDS)
    return _agree(
        settings, _DP, len(ids) // tp, place, f"{len(ids)} inference devices and {dotted(_TP)} = {tp}"
    )


def _trainer(settings: Settings) -> list[Problem]:
    ids = settings.get(_TRAINER_IDS)
    if ids is MISSING:
        ids = _free_device(settings)
        if ids != RLConfig.model_fields["trainer_gpu_ids"].default:
            settings.put(_TRAINER_IDS, ids, _place(settings, _INFERENCE_IDS))
    if not _are_ids(ids) or not isinstance(settings.get(("orchestrator",)), dict):
        return []
    place = _place(settings, _TRAINER_IDS)
    return _agree(settings, _WORKERS, len(ids), place, f"{len(ids)} trainer devices (trainer_gpu_ids)")


def _free_device(settings: Settings) -> list[int]:
    """The trainer's device if none is given: not one of inference."""
    default: list[int] = RLConfig.model_fields["trainer_gpu_ids"].default
    taken = settings.get(_INFERENCE_IDS)
    return [max(taken) + 1] if _are_ids(taken) and set(default) & set(taken) else default


def _agree(settings: Settings, path: KeyPath, value: int, place: Place, reason: str) -> list[Problem]:
    """Set `path` to what follows from `reason`, unless it was set otherwise in the same or a higher layer."""
    present = settings.get(path)
    if present == value or not isinstance(settings.get(path[:-1]), dict | type(MISSING)):
        return []
    own = settings.place(path)
    if present is MISSING or own is None or own.layer < place.layer:
        settings.put(path, value, place)
        return []
    settings.put(path, value, place)
    message = f"is {present}, but {reason} ({place.text}) make it {value}. Leave one of the two out."
    return [Problem(path=path, place=own, message=message)]


def _place(settings: Settings, path: KeyPath) -> Place:
    return settings.place(path) or Place("by default", Layer.VARIABLE)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(i) or i == 0 for i in value)
