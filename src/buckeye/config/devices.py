"""Set the number of replicas of a run from its device ids, or the device ids from the number of replicas."""

from __future__ import annotations

import math
from typing import Any

from buckeye.config.problems import Problem, conflict_problem
from buckeye.config.settings import BY_DEFAULT, MISSING, KeyPath, Settings, dotted

_INFERENCE_IDS: KeyPath = ("inference_gpu_ids",)
_TRAINER_IDS: KeyPath = ("trainer_gpu_ids",)
_DP: KeyPath = ("inference", "parallel", "dp")
_TP: KeyPath = ("inference", "parallel", "tp")
_TRAINER_TP: KeyPath = ("trainer", "model", "tp")
_REPLICATE: KeyPath = ("trainer", "model", "dp_replicate")
_MEMORY: KeyPath = ("inference", "gpu_memory_utilization")
_MAX_DEVICES = 1024
_SHARED_GPU_MEMORY = 0.4

INFERENCE_DEVICES = [0]
TRAINER_DEVICES = [1]
"""Default ids of the devices of the trainer. `INFERENCE_DEVICES` has the default ids of inference."""


def reconcile_devices(settings: Settings) -> list[Problem]:
    """Make device ids, replicas and ranks consistent, in place. Return the settings that conflict.

    This function ignores values of a wrong type, and devices that cannot be divided. The validation reports
    them.
    """
    has_inference = isinstance(settings.get(("inference",)), dict)
    problems = _reconcile_replicas(settings) if has_inference else []
    colocate = settings.get(("colocate",)) is True
    _set_trainer_devices(settings, colocate=colocate)
    if has_inference and not colocate:
        _share_memory(settings)
    return problems


def _reconcile_replicas(settings: Settings) -> list[Problem]:
    tp = settings.get(_TP)
    tp = 1 if tp is MISSING else tp
    ids, dp = settings.get(_INFERENCE_IDS), settings.get(_DP)
    if not _is_count(tp) or not (ids is MISSING or _are_ids(ids)) or not (dp is MISSING or _is_count(dp)):
        return []
    if ids is MISSING:
        count = tp * (1 if dp is MISSING else dp)
        location = settings.location(_DP) or settings.location(_TP)
        if location is not None and count <= _MAX_DEVICES:
            settings.put(_INFERENCE_IDS, list(range(count)), location)
        return []
    if len(ids) % tp:
        return []
    return _set_replicas(settings, len(ids) // tp, f"{len(ids)} inference devices and `{dotted(_TP)}` = {tp}")


def _set_trainer_devices(settings: Settings, *, colocate: bool) -> None:
    ids = _free_devices(settings)
    if colocate:
        chosen = settings.get(_INFERENCE_IDS)
        ids = chosen if _are_ids(chosen) else INFERENCE_DEVICES
    if settings.get(_TRAINER_IDS) is MISSING and ids != TRAINER_DEVICES:
        reasons = (_TRAINER_TP, _REPLICATE, _INFERENCE_IDS)
        location = next((location for path in reasons if (location := settings.location(path))), None)
        settings.put(_TRAINER_IDS, ids, location or settings.location(_INFERENCE_IDS) or BY_DEFAULT)


def _share_memory(settings: Settings) -> None:
    """Set a lower memory share of vLLM if the trainer uses one of its GPUs."""
    ids = []
    for path, default in ((_INFERENCE_IDS, INFERENCE_DEVICES), (_TRAINER_IDS, TRAINER_DEVICES)):
        value = settings.get(path)
        ids.append(default if value is MISSING else value)
    if all(map(_are_ids, ids)) and set(ids[0]) & set(ids[1]) and settings.get(_MEMORY) is MISSING:
        settings.put(_MEMORY, _SHARED_GPU_MEMORY, settings.location(_TRAINER_IDS) or BY_DEFAULT)


def _free_devices(settings: Settings) -> list[int]:
    """Return the default device ids of the trainer.

    They are as many as its settings need, and none of them is a device of inference.
    """
    values = [settings.get(path) for path in (_TRAINER_TP, _REPLICATE)]
    count = math.prod(value for value in values if _is_count(value))
    first = TRAINER_DEVICES[0]
    default = list(range(first, first + min(count, _MAX_DEVICES)))
    inference_ids = settings.get(_INFERENCE_IDS)
    if not _are_ids(inference_ids) or not set(default) & set(inference_ids):
        return default
    return [device - first + max(inference_ids) + 1 for device in default]


def _set_replicas(settings: Settings, count: int, reason: str) -> list[Problem]:
    """Set the number of replicas to `count`, which follows from the devices.

    Return a problem if an equal or higher layer sets another number.
    """
    present = settings.get(_DP)
    if present == count or not isinstance(settings.get(_DP[:-1]), dict | type(MISSING)):
        return []
    location, own = settings.location(_INFERENCE_IDS) or BY_DEFAULT, settings.location(_DP)
    problems = []
    if present is not MISSING and own is not None and own.layer >= location.layer:
        message = f"`{dotted(_DP)}` = {present}, but {reason} give {count}"
        hint = f"leave `{dotted(_DP)}` or `{dotted(_INFERENCE_IDS)}` out"
        problems.append(conflict_problem([(_DP, own), (_INFERENCE_IDS, location)], message, hint=hint))
    settings.put(_DP, count, location)
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(i) or i == 0 for i in value)
