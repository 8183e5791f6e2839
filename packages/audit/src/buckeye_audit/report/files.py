"""Writing a report: `report.md`, `report.json` and the pictures."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buckeye import __version__
from buckeye.base.storage import write_file
from buckeye_audit.report.evaluations import Evaluation
from buckeye_audit.report.gather import Report
from buckeye_audit.report.plots import before_after_bars, exact_curves, rendered, training_reward
from buckeye_audit.report.rows import Row
from buckeye_audit.report.text import markdown, summary


def write_report(report: Report, directory: Path) -> list[Path]:
    """Write everything under `directory` and return the paths, the Markdown first. Pictures need
    matplotlib; without it there are none."""
    drawn = draw(report) if can_draw() else {}
    pictures = {f"{name}.png": title for name, (title, _) in drawn.items()}
    for name, (_, figure) in drawn.items():
        write_file(directory / f"{name}.png", rendered(figure, "png"))
    shown = [(what, name) for name, what in pictures.items()]
    write_file(directory / "report.json", json.dumps(as_json(report), indent=1, ensure_ascii=False) + "\n")
    write_file(directory / "report.md", markdown(report, shown))
    return [directory / name for name in ("report.md", "report.json", *pictures)]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report) -> dict[str, tuple[str, Any]]:
    """File name without its ending -> what the picture shows, and the figure."""
    figures: dict[str, tuple[str, Any]] = {}
    if len(report.curve) > 1:
        floors = {
            row.split: row.content_free.exact
            for row in report.rows
            if row.family is None and row.content_free is not None
        }
        title = f"{report.name}: exact match on held-out tasks"
        figures["exact_match"] = (title, exact_curves(report.curve, floors, title))
    families = report.part(families=True, splits=False)
    splits = report.part(families=False, splits=True)
    whole = report.part(families=False, splits=False)
    for what, rows in (("families", families), ("splits", splits), ("all tasks", whole)):
        if rows and (rows is not whole or not figures.keys() & {"families", "splits"}):
            title = f"{report.name}: {what} before and after"
            figures[what.replace(" ", "_")] = (title, before_after_bars(rows, title))
    if report.training is not None:
        names = ", ".join(report.training.environments) or report.name
        title = f"Training on {names}"
        figure = training_reward(report.training.rewards, report.training.floor, title)
        figures["training"] = (f"{title}: mean reward over the steps", figure)
    return figures


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    training = report.training
    return {
        "environment": {
            "name": report.name,
            "id": report.env_id,
            "args": dict(report.args),
            "content_hash": report.content_hash,
        },
        "buckeye": __version__,
        "summary": summary(report),
        "warnings": list(report.warnings),
        "before": _evaluation(report.before) if report.before is not None else None,
        "after": _evaluation(report.after),
        "rows": [_row(row) for row in report.rows],
        "curve": [
            {"step": step, "exact": [{"split": split, **asdict(e)} for split, e in at.items()]}
            for step, at in report.curve.items()
        ],
        "training": asdict(training) if training is not None else None,
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return {"file": str(evaluation.file), **evaluation.measured}


def _row(row: Row) -> dict[str, Any]:
    return {"label": row.label, "verdict": row.verdict, "above_floor": row.above_floor, **asdict(row)}
