"""What the demonstration shows at its end: table, report, model card, summary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from buckeye import __version__
from buckeye.demo.stages import ENVIRONMENT, DemoPaths, weights
from buckeye.monitor.intervals import Estimate
from buckeye.run.report.files import write_report
from buckeye.run.report.gather import Report, ReportRequest, make_report
from buckeye.run.report.rows import Side
from buckeye.run.report.text import exact_table, overview
from buckeye.storage import write_directory, write_file


def report(paths: DemoPaths, *, seconds: float) -> str:
    """Write summary.json, report/ and model/, and return the table to print."""
    request = ReportRequest(
        env_id=ENVIRONMENT, run=paths.rl, before=paths.evals("before"), after=paths.evals("after")
    )
    measured = make_report(request)
    write_report(measured, paths.report)
    summary = {**_summary(measured), "seconds": round(seconds, 1)}
    write_file(paths.root / "summary.json", json.dumps(summary, indent=1))
    table = exact_table(overview(measured))
    _export_model(paths, table)
    return table


def _summary(measured: Report) -> dict[str, Any]:
    (everything,) = measured.part(families=False, splits=False)
    assert everything.content_free is not None
    return {
        "before": _score(everything.before),
        "after": _score(everything.after),
        "content_free": {"exact": everything.content_free.exact},
        "families": {
            row.label: {"before": _score(row.before), "after": _score(row.after)}
            for row in measured.part(families=True, splits=False)
        },
    }


def _score(side: Side | None) -> dict[str, Any] | None:
    exact: Estimate | None = side.exact if side is not None else None
    return None if exact is None else {"exact": exact.value, "ci95": (exact.low, exact.high), "n": exact.n}


def _export_model(paths: DemoPaths, table: str) -> None:
    source = weights(paths.rl, "train.toml")

    def fill(directory: Path) -> None:
        shutil.copytree(source, directory, dirs_exist_ok=True)
        (directory / "manifest.json").unlink(missing_ok=True)
        (directory / "README.md").write_text(model_card(table), encoding="utf-8")

    write_directory(paths.model, fill, replace=True)


def model_card(table: str) -> str:
    """The README.md of the trained model."""
    return f"""---
library_name: transformers
license: apache-2.0
tags: [reinforcement-learning, dakota, buckeye]
---
# A small model of Dakota grammar

A small Qwen3-architecture model, made and trained from nothing by `buckeye demo`
(Buckeye {__version__}): a warm start on generated question-answer pairs, then reinforcement learning against
the deterministic grader of the `dakota1890` environment.

Exact match in per cent on held-out tasks, greedy decoding, with 95 % intervals that take tasks about the same
words as one observation. *No content* is the best policy that never looks at what is asked.

```
{table}
```

The Dakota forms follow a grammar and dictionary printed in the nineteenth century. They are historical Santee
Dakota and have not been checked by speakers. The model knows nothing but these exercises.
"""
