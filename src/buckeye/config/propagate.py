"""Settings that several sections share: said once, they hold everywhere; said differently twice, they are
refused.

Works on the tree before validation. Among the places where a shared setting may stand, the command line beats
files and files beat the environment; two different values of equal standing are a problem that names both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buckeye.config.tree import Leaf, Node, Path, get, put

_ALL = ("trainer", "orchestrator", "inference")
_BOTH = ("trainer", "orchestrator")

# setting -> the places it may stand in, the shared one first; the first of them names it in messages
_SHARED: dict[str, tuple[Path, ...]] = {
    "model.name": (("model", "name"), *((s, "model", "name") for s in _ALL)),
    "max_steps": (("max_steps",), *((s, "max_steps") for s in _BOTH)),
    "max_async_level": (("max_async_level",), *((s, "max_async_level") for s in _BOTH)),
    "ckpt.interval": (("ckpt", "interval"), *((s, "ckpt", "interval") for s in _BOTH)),
    "ckpt.keep": (("ckpt", "keep"), *((s, "ckpt", "keep") for s in _BOTH)),
    "ckpt.resume_step": (("ckpt", "resume_step"), *((s, "ckpt", "resume_step") for s in _BOTH)),
    "log.level": (("log", "level"), *((s, "log", "level") for s in _ALL)),
    "log.file": (("log", "file"), *((s, "log", "file") for s in _ALL)),
    "output_dir": (("output_dir",), *((s, "output_dir") for s in _ALL)),
    "wandb.project": (("wandb", "project"), *((s, "wandb", "project") for s in _BOTH)),
    "wandb.name": (("wandb", "name"), *((s, "wandb", "name") for s in _BOTH)),
    "wandb.offline": (("wandb", "offline"), *((s, "wandb", "offline") for s in _BOTH)),
    "weight_broadcast.type": (
        ("weight_broadcast", "type"),
        *((s, "weight_broadcast", "type") for s in _ALL),
    ),
    "seq_len": (("orchestrator", "seq_len"), ("trainer", "seq_len")),
    "max_model_len": (("max_model_len",), ("inference", "model", "max_model_len")),
    "bench": (("bench",), *((s, "bench") for s in _BOTH)),
}
# these may differ: the orchestrator's samples only have to fit into the trainer's bins
_MAY_DIFFER = {"seq_len", "log.level", "log.file"}


def propagate(tree: dict[str, Node], problems: list[str]) -> None:
    """Fill shared settings in wherever they are missing; append disagreements to `problems`."""
    _resume_flag(tree)
    _enabled_sections(tree)
    for name, places in _SHARED.items():
        _share(tree, name, places, problems)
    _devices(tree, problems)


def _share(tree: dict[str, Node], name: str, places: Sequence[Path], problems: list[str]) -> None:
    explicit = [
        (path, leaf) for path in places if isinstance(leaf := get(tree, path), Leaf) and leaf.rank >= 0
    ]
    if not explicit:
        return
    strongest = max(leaf.rank for _, leaf in explicit)
    chosen = [(path, leaf) for path, leaf in explicit if leaf.rank == strongest]
    _, winner = chosen[0]
    for path, leaf in chosen[1:]:
        if _text(leaf.value) != _text(winner.value) and name not in _MAY_DIFFER:
            problems.append(
                f"{name} is set twice and differently: {_text(winner.value)} ({winner.place}, "
                f"{'.'.join(chosen[0][0])}) and {_text(leaf.value)} ({leaf.place}, {'.'.join(path)}). Set it once"
            )
            return
    for path in places:
        present = get(tree, path)
        keep_own = name in _MAY_DIFFER and isinstance(present, Leaf) and present.rank >= winner.rank
        if path[0] == "inference" and "inference" not in tree:
            continue  # no engines are started by this run
        if not keep_own and not isinstance(get(tree, path[:1]), Leaf):
            put(tree, path, winner)


def _text(value: Any) -> str:
    return str(value)


def _resume_flag(tree: dict[str, Node]) -> None:
    """`--resume` is `ckpt.resume_step = -1` unless a step is named."""
    flag = get(tree, ("resume",))
    if not isinstance(flag, Leaf) or str(flag.value).lower() not in ("true", "1", "yes", "on"):
        return
    for section in ((), *((s,) for s in _BOTH)):
        if isinstance(get(tree, (*section, "ckpt", "resume_step")), Leaf):
            return
    put(tree, ("ckpt", "resume_step"), Leaf(-1, flag.place, flag.rank))


def _enabled_sections(tree: dict[str, Node]) -> None:
    """`--ckpt` (or `[ckpt]` in one file) turns a shared section on for both processes."""
    for name in ("ckpt", "wandb"):
        present = [get(tree, path) for path in ((name,), *((s, name) for s in _BOTH))]
        if not any(isinstance(node, dict) for node in present):
            continue
        for section in _BOTH:
            if get(tree, (section, name)) is None and not isinstance(get(tree, (section,)), Leaf):
                put(tree, (section, name), {})
    shared = get(tree, ("ckpt",))
    if isinstance(shared, dict) and "interval" not in shared and "resume_step" not in shared:
        put(tree, ("ckpt", "interval"), Leaf(50, "default", 0))  # a bare --ckpt saves every 50 steps


def _devices(tree: dict[str, Node], problems: list[str]) -> None:
    """dp = number of inference devices / tp, whichever is not given; one train worker a trainer device."""
    trainer_ids = _ids(tree, "trainer_gpu_ids")
    if trainer_ids is not None:
        put_default(tree, ("orchestrator", "num_train_workers"), Leaf(len(trainer_ids), "trainer_gpu_ids", 0))
    if not isinstance(tree.get("inference"), dict):
        return
    ids, tp, dp = _ids(tree, "inference_gpu_ids"), _int(tree, "tp"), _int(tree, "dp")
    size = tp or 1
    if ids is not None and len(ids) % size:
        problems.append(
            f"inference_gpu_ids has {len(ids)} devices, which {size} (inference.parallel.tp) does not divide"
        )
    elif ids is not None and dp is not None and dp * size != len(ids):
        problems.append(
            f"inference.parallel: dp {dp} x tp {size} needs {dp * size} devices and inference_gpu_ids has "
            f"{len(ids)}; leave dp out, it follows from the ids"
        )
    elif ids is not None:
        put(tree, ("inference", "parallel", "dp"), Leaf(len(ids) // size, "inference_gpu_ids", 0))
    elif dp is not None or tp is not None:
        needed = (dp or 1) * size
        put(tree, ("inference_gpu_ids",), Leaf(list(range(needed)), "inference.parallel", 0))
        put_default(tree, ("trainer_gpu_ids",), Leaf([needed], "inference.parallel", 0))


def put_default(tree: dict[str, Node], path: Path, leaf: Leaf) -> None:
    """Set a leaf unless there is one."""
    if get(tree, path) is None and not isinstance(get(tree, path[:1]), Leaf):
        put(tree, path, leaf)


def _ids(tree: dict[str, Node], name: str) -> list[Any] | None:
    leaf = get(tree, (name,))
    if not isinstance(leaf, Leaf):
        return None
    return leaf.value if isinstance(leaf.value, list) else [leaf.value]


def _int(tree: dict[str, Node], name: str) -> int | None:
    leaf = get(tree, ("inference", "parallel", name))
    if not isinstance(leaf, Leaf):
        return None
    try:
        number = int(leaf.value)
    except (TypeError, ValueError):
        return None  # validation will say so
    return number if number > 0 else None
