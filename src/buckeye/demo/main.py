"""The whole demonstration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from buckeye.demo.report import report
from buckeye.demo.stages import DemoPaths, run_stages


def run_demo(output_dir: Path, *, seed: int, show: Callable[[str], None]) -> None:
    """Run what has not been run yet under `output_dir`, then `show` the results."""
    started = time.monotonic()
    paths = DemoPaths(root=output_dir)
    run_stages(paths, seed=seed)
    table = report(paths, seconds=time.monotonic() - started)
    show(f"\n{table}\n")
    show(f"reward curve:  {output_dir / 'reward.png'}")
    show(f"figures:       {output_dir / 'summary.json'}")
    show(f"model:         {paths.model}")
    show(f"talk to it:    buckeye chat {paths.model}")
