"""`--dry-run`: the one place that decides whether a run is started or only shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buckeye.config.rl import RLConfig

_FOR_CHILDREN = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def carry_out(config: RLConfig, *, show: Callable[[], None], start: Callable[[], int]) -> int:
    """`start` the run, here or elsewhere; with --dry-run only `show` what that would do. The exit code."""
    if not config.dry_run:
        return start()
    with nothing_written():
        show()
    print("Nothing was written or started.", file=sys.stderr)
    return 0


def show_described(text: str, warnings: Iterable[str]) -> None:
    """Print what would be started, and what is in its way."""
    print(text)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def nothing_written() -> Iterator[None]:
    """Look around without a trace: Python writes no compiled modules beside those of the user, and nothing is
    fetched into the cache of the Hugging Face hub."""
    bytecode, variables = sys.dont_write_bytecode, dict(os.environ)
    offline = _set_offline(True)
    sys.dont_write_bytecode = True
    os.environ.update(_FOR_CHILDREN)
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        for name in _FOR_CHILDREN:
            os.environ.pop(name)
        os.environ.update({name: variables[name] for name in _FOR_CHILDREN if name in variables})
        _set_offline(offline)


def _set_offline(value: bool) -> bool:
    """Tell the hub's library, which reads its variable only once; returns what it had read."""
    constants = sys.modules.get("huggingface_hub.constants")
    before = bool(getattr(constants, "HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE") == "1"))
    if constants is not None:
        constants.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]
    return before
