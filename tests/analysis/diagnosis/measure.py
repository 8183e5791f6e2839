"""Play the catalogue and print what the diagnosis names.

`python -m tests.analysis.diagnosis.measure DIR [NAME ...]`

Runs that are in DIR are not played again. Without names, a table of precision and recall by link follows.
"""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from tests.analysis.diagnosis.catalogue import FAULTS, HEALTHY
from tests.analysis.diagnosis.small_runs import play, warm_model

from buckeye.analysis.diagnosis.chain import CHAIN, METRIC_FINDINGS
from buckeye.analysis.diagnosis.diagnose import diagnose
from buckeye.monitor.finding import Finding


def main(root: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    root.mkdir(exist_ok=True, parents=True)
    warm = root / "sft/weights/step_60"
    if not warm.exists():
        warm_model(root)
    named = {name: first_finding(root, warm, name) for name in chosen or (*FAULTS, *HEALTHY)}
    if not chosen:
        print("\n".join(table(named)))


def first_finding(root: Path, warm: Path, name: str) -> Finding | None:
    """Play a run if it is not there, diagnose it, and print the result. Return its first finding."""
    folder, begun = root / "".join(letter if letter.isalnum() else "-" for letter in name), time.time()
    fault = FAULTS.get(name)
    if not (folder / "run" / "metrics.jsonl").exists():
        folder.mkdir(exist_ok=True)
        try:
            if fault is not None:
                play(folder / "run", fault.model(warm, folder), fault.small, fault.plant())
            else:
                play(folder / "run", warm, HEALTHY[name])
        except Exception:
            traceback.print_exc()
    played = time.time()
    done = diagnose(folder / "run", tests=fault is not None and "wrong_tokenizer" in fault.names)
    first = next(iter(done.findings), None)
    right = done.cause is None if fault is None else first is not None and first.name in fault.names
    found = [f"{one.name} ({one.confidence})" for one in done.findings]
    print("ok   " if right else "WRONG", f"{name:32}", found, end=" ")
    print(f"{played - begun:.1f} s, {time.time() - played:.1f} s", flush=True)
    return first if fault is not None else done.cause


def table(named: dict[str, Finding | None]) -> list[str]:
    """Return a Markdown table by link: planted faults, those named first, and runs accused wrongly."""
    planted = {name: link_of(fault.names[0]) for name, fault in FAULTS.items()}
    right = {name for name, found in named.items() if found is not None and found.name in names_of(name)}
    wrong = Counter(link_of(found.name) for name, found in named.items() if found and name not in right)
    lines = ["| link | planted | named first | accused wrongly |", "|---|---|---|---|"]
    for link in CHAIN:
        of_link = [name for name in planted if planted[name] == link]
        lines.append(
            f"| {link} | {len(of_link)} | {sum(name in right for name in of_link)} | {wrong[link]} |"
        )
    return [
        *lines,
        f"| healthy runs | {len(HEALTHY)} | | {sum(named[name] is not None for name in HEALTHY)} |",
    ]


def names_of(run: str) -> tuple[str, ...]:
    return FAULTS[run].names if run in FAULTS else ()


def link_of(name: str) -> str:
    """Return the link whose checks, or whose tests, have a finding of this name."""
    sources = {link: inspect.getsource(sys.modules[checks[0].__module__]) for link, checks in CHAIN.items()}
    found = next((link for link, source in sources.items() if f'"{name}"' in source), None)
    return found or METRIC_FINDINGS.get(name, "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
