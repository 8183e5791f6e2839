"""What the demonstration shows at its end: table, curve, model card, summary."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buckeye import __version__
from buckeye.demo.stages import ENVIRONMENT, DemoPaths, weights
from buckeye.envs.baselines import best_content_free_score
from buckeye.envs.registry import load_environment
from buckeye.monitor.metrics import latest_by_step
from buckeye.orchestrator.evaluate import wilson_interval
from buckeye.storage import read_json, write_directory, write_file

_ALL = "all held-out tasks"


@dataclass(frozen=True, slots=True)
class Score:
    """Exact match on `n` tasks with its 95 % Wilson interval."""

    exact: float
    ci95: tuple[float, float]
    n: int


def report(paths: DemoPaths, *, seconds: float) -> str:
    """Write summary.json, reward.png and model/, and return the table to print."""
    before, after = _scores(paths, "before"), _scores(paths, "after")
    environment = load_environment(ENVIRONMENT, **_env_args(paths))
    content_free = asyncio.run(best_content_free_score(environment, split="eval"))
    summary = {
        "before": asdict(before[_ALL]),
        "after": asdict(after[_ALL]),
        "content_free": {"exact": content_free},
        "seconds": round(seconds, 1),
        "families": {
            name: {"before": asdict(before[name]), "after": asdict(after[name])}
            for name in before
            if name != _ALL
        },
    }
    write_file(paths.root / "summary.json", json.dumps(summary, indent=1))
    plot_reward(paths.rl / "metrics.jsonl", paths.root / "reward.png", content_free=content_free)
    table = _table(before, after, content_free)
    _export_model(paths, table)
    return table


def _env_args(paths: DemoPaths) -> dict[str, Any]:
    config = read_json(paths.rl / "configs" / "rl.json")
    return dict(config["orchestrator"]["env"][0]["args"])


def _scores(paths: DemoPaths, name: str) -> dict[str, Score]:
    """Exact match per family and over all, from the rollouts that `evals` wrote."""
    solved: dict[str, list[bool]] = defaultdict(list)
    for line in paths.rollouts(name).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for key in (_ALL, record["data"]["family"]):
            solved[key].append(record["reward"] is not None and record["reward"] >= 1.0)
    return {key: Score(sum(v) / len(v), wilson_interval(sum(v), len(v)), len(v)) for key, v in solved.items()}


def _table(before: dict[str, Score], after: dict[str, Score], content_free: float) -> str:
    """Plain aligned text, readable also in a Markdown code block."""
    rows = [("exact match, greedy", "n", "before RL", "after RL")]
    for name in sorted(before, key=lambda n: (n == _ALL, n)):
        rows.append((name, str(before[name].n), _cell(before[name]), _cell(after[name])))
    rows.append(("best content-free policy", "", f"{content_free:6.1%}", f"{content_free:6.1%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def _cell(score: Score) -> str:
    low, high = score.ci95
    return f"{score.exact:6.1%}  [{low:.1%}, {high:.1%}]"


def plot_reward(metrics: Path, picture: Path, *, content_free: float) -> None:
    """Mean reward of all rollouts played for a step, groups without spread included, and its running mean;
    the content-free score as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = latest_by_step(metrics, "orchestrator")
    steps = sorted(records)
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130, layout="constrained")
    rewards = [records[s]["reward/played"] for s in steps]
    axes.plot(steps, rewards, color="#b0413e", linewidth=0.8, alpha=0.4)
    axes.plot(steps, running_mean(rewards, 9), color="#b0413e", linewidth=2, label="policy, mean of 9 steps")
    floor = {"color": "#555555", "linewidth": 1, "linestyle": "--"}
    axes.axhline(content_free, label="best content-free policy", **floor)
    axes.set(xlabel="step", ylabel="mean reward of the rollouts", title="dakota1890", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    temporary = picture.with_suffix(".tmp.png")
    figure.savefig(temporary)
    pyplot.close(figure)
    temporary.replace(picture)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the `width` values around each one; of fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


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

Held-out words only, greedy decoding, 95 % Wilson intervals. They take tasks as independent; tasks about the
same word are not quite, so the true uncertainty is somewhat larger.

```
{table}
```

The Dakota forms follow a grammar and dictionary printed in the nineteenth century. They are historical Santee
Dakota and have not been checked by speakers. The model knows nothing but these exercises.
"""
