"""`rl export-rollouts`: what a run played, for other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.storage import write_directory
from buckeye.errors import BuckeyeError, UsageError
from buckeye.run_files.known_runs import find_run
from buckeye_audit.exchange.formats import WRITERS, Format

_ODD = re.compile(r"[^\w ./-]")
_STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def export_rollouts(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
    kind: Annotated[
        Format, typer.Option("--format", help="Inspect's logs, the hub's session traces, or tables.")
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new directory; default: exports/rollouts-FORMAT.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="train, eval (of evaluations), or all.")] = "all",
    steps: Annotated[str | None, typer.Option(metavar="N[-M]", help="Only these; default: all.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload it as a dataset, a private one if new.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the new dataset of --push public.")] = False,
) -> None:
    """Write what a run played as logs of Inspect (eval), session traces of the Hugging Face hub (sts),
    Parquet or JSON Lines. Keys are replaced by (redacted)."""
    from buckeye.runs.export import Hub
    from buckeye_audit.exchange.sources import open_source

    if split not in ("train", "eval", "all"):
        raise UsageError(f"--split {split}: write train, eval or all")
    if public and push is None:
        raise UsageError("--public says how --push uploads; it needs that")
    wanted = _range(steps)
    where = str(find_run(None)) if run is None else run
    source, default = open_source(where)
    directory = out or default / "exports" / f"rollouts-{kind}"
    if directory.exists():
        raise UsageError(f"{directory} exists, and nothing is overwritten. Name another directory with --out")
    hub = Hub(push, private=not public, kind="dataset") if push is not None else None
    written: list[int] = []

    def fill(temporary: Path) -> None:
        splits = ("train", "eval") if split == "all" else (split,)
        played = source.played(splits, wanted)
        written.append(WRITERS[kind](played, temporary, source.model))
        if not written[0]:
            raise BuckeyeError(f"{where}: no rollouts of what was asked for, or their texts were deleted")
        card = _card(kind, source.name, source.model, written[0])
        (temporary / "README.md").write_text(card, encoding="utf-8")

    write_directory(directory, fill)
    print(f"{directory}: {written[0]} rollouts")
    for problem in source.unreadable:
        typer.echo(f"warning: left out: {problem}", err=True)
    if hub is not None:
        print(f"uploading to {hub.name} ({hub.visibility})")
        print(hub.upload(directory))


def _range(steps: str | None) -> range | None:
    if steps is None:
        return None
    found = _STEPS.fullmatch(steps)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--steps {steps}: write a step as 7, or the first and the last as 0-9")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def _card(kind: Format, name: str, model: str, rollouts: int) -> str:
    """The README.md of what was written, with the hub's header."""
    files = {"sts": "sessions/*.jsonl", "parquet": "rollouts.parquet", "jsonl": "rollouts.jsonl"}
    data = ["configs:", "- config_name: default", f"  data_files: {files[kind]}"] if kind in files else []
    tags = ["buckeye", "reinforcement-learning", *(["agent-traces"] if kind == "sts" else [])]
    head = "\n".join(["---", "tags:", *(f"- {tag}" for tag in tags), *data, "---"])
    title, by = (_ODD.sub("_", text) for text in (name, model))
    what = f"{rollouts} rollouts of the run `{title}` of `{by}`, by `rl export-rollouts --format {kind}`"
    return f"{head}\n\n# {title}\n\n{what}. Keys are replaced by (redacted).\n"
