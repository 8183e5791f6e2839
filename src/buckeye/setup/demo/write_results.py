"""Write the results of the demonstration: table, model card, summary."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json, write_directory, write_file
from buckeye.monitor.intervals import Estimate
from buckeye.setup.demo.baseline import measure_baseline
from buckeye.setup.demo.held_out import HeldOutResult, compare_held_out, exact_table, read_held_out_tasks
from buckeye.setup.demo.stages import ENVIRONMENT, DemoPaths, weights
from buckeye.version import __version__
from buckeye.workers.loading import load_environment


def write_results(paths: DemoPaths, *, seconds: float) -> str:
    """Write summary.json and model/, and return the table to print."""
    before = read_held_out_tasks(paths.rollouts("before"))
    after = read_held_out_tasks(paths.rollouts("after"))
    settings = read_json(paths.settings("after"))
    environment = load_environment(ENVIRONMENT, **settings["args"])
    baseline = asyncio.run(measure_baseline(environment, settings["split"], after))
    result = compare_held_out(before, after, baseline)
    write_file(paths.root / "summary.json", json.dumps(_summary(result, seconds), indent=1))
    table = exact_table(result)
    _export_model(paths, table)
    return table


def _summary(result: HeldOutResult, seconds: float) -> dict[str, Any]:
    return {
        "before": _score(result.before),
        "after": _score(result.after),
        "content_free": {"exact": result.baseline},
        "seconds": round(seconds, 1),
    }


def _score(exact: Estimate | None) -> dict[str, Any] | None:
    return None if exact is None else {"exact": exact.value, "ci95": (exact.low, exact.high), "n": exact.n}


def _export_model(paths: DemoPaths, table: str) -> None:
    source = weights(paths.rl, "train.toml")

    def write_files(directory: Path) -> None:
        shutil.copytree(source, directory, dirs_exist_ok=True)
        (directory / "manifest.json").unlink(missing_ok=True)
        (directory / "README.md").write_text(model_card(table), encoding="utf-8")

    write_directory(paths.model, write_files, replace=True)


def model_card(table: str) -> str:
    """Return the README.md of the trained model."""
    return f"""---
library_name: transformers
license: apache-2.0
tags: [reinforcement-learning, dakota, buckeye]
---
# A small model of Dakota grammar

A small Qwen3-architecture model, trained from random weights by `buckeye demo`
(Buckeye {__version__}): a warm start on generated question-answer pairs, then reinforcement learning against
the deterministic grader of the `dakota1890` environment.

Exact match in per cent on held-out tasks, greedy decoding, with 95 % intervals. Tasks about the same words
count as one observation. *No content* is the best policy that does not read the task.

```
{table}
```

The Dakota forms follow a grammar and dictionary printed in the nineteenth century. They are historical Santee
Dakota and have not been checked by speakers. The model was trained only on these exercises.
"""
