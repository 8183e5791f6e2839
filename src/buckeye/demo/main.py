"""The whole demonstration."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from buckeye.demo.report import report
from buckeye.demo.stages import DemoPaths, run_stages
from buckeye.distribution import install_command, need
from buckeye.errors import UsageError
from buckeye.storage import read_json, write_file


def run_demo(output_dir: Path, *, seed: int, show: Callable[[str], None]) -> None:
    """Run what has not been run yet under `output_dir`, then `show` the results.

    Raises UsageError if the directory holds the demonstration of another seed.
    """
    need("torch", "The demonstration")
    started = time.monotonic()
    record_file = output_dir / "demo.json"
    record = read_json(record_file) if record_file.exists() else {"seed": seed, "seconds": 0.0}
    if record["seed"] != seed:
        raise UsageError(
            f"{output_dir} holds the demonstration with seed {record['seed']}. For seed {seed} choose "
            f"another directory: buckeye demo --seed {seed} --output-dir {output_dir}-{seed}"
        )
    paths = DemoPaths(root=output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    done = paths.rollouts("after").exists()
    write_file(record_file, json.dumps(record))
    try:
        run_stages(paths, seed=seed)
    finally:
        if not done:  # looking at a finished demonstration again takes no time of its own
            record["seconds"] += time.monotonic() - started
            write_file(record_file, json.dumps(record))
    table = report(paths, seconds=record["seconds"])
    show(f"\n{table}\n")
    show(f"report:        {paths.report / 'report.md'}")
    curve = paths.report / "training.png"
    show(f"reward curve:  {curve if curve.exists() else 'not drawn: ' + install_command('docs')}")
    show(f"figures:       {output_dir / 'summary.json'}")
    show(f"model:         {paths.model}")
    show(f"talk to it:    buckeye chat {paths.model}")
