"""Run all stages of `buckeye demo`, and print the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.base.distribution import need
from buckeye.base.storage import read_json, write_file
from buckeye.errors import UsageError
from buckeye.setup.demo.stages import DemoPaths, run_stages
from buckeye.setup.demo.write_results import write_results


def run_demo(output_dir: Path, *, seed: int, show: Callable[[str], None]) -> None:
    """Run the stages that are not complete in `output_dir`, then `show` the results.

    Raises UsageError if the directory contains a demonstration with another seed.
    """
    need("torch", "The demonstration")
    started = time.monotonic()
    record_file = output_dir / "demo.json"
    record = read_json(record_file) if record_file.exists() else {"seed": seed, "seconds": 0.0}
    if record["seed"] != seed:
        raise UsageError(
            f"{output_dir} contains a demonstration with seed {record['seed']}, not {seed}",
            code="BK-FILE-EXISTS",
            hint="Use another directory: "
            f"`buckeye demo --seed {seed} --output-dir {quoted(f'{output_dir}-{seed}')}`",
        )
    paths = DemoPaths(root=output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    is_done = paths.figures("after").exists()
    write_file(record_file, json.dumps(record))
    try:
        run_stages(paths, seed=seed)
    finally:
        if not is_done:  # showing a finished demonstration must not add to its time
            record["seconds"] += time.monotonic() - started
            write_file(record_file, json.dumps(record))
    table = write_results(paths, seconds=record["seconds"])
    show(f"\n{table}\n")
    show(f"figures:       {output_dir / 'summary.json'}")
    show(f"model:         {paths.model}")
    show(f"chat:          buckeye chat {quoted(paths.model)}")
    show(f"report:        buckeye rl report {quoted(paths.rl)}")
    show(f"browser:       buckeye ui {quoted(paths.rl)}")
