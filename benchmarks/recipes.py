"""Train the recipes of recipes/ with several seeds, and write their expected curves.

    python -m benchmarks.recipes NAME ... [--seeds 5] [--folder DIR]  # write recipes/NAME/expected.json
    python -m benchmarks.recipes                                      # write the table and the picture again

A recipe is a folder. The comment at the top of its `run.toml` has its commands; this program runs these,
in a copy of the folder. The commands before `rl` run once, so all seeds share the start model. Existing
results of an unchanged recipe are reused. The table has processor time, since other programs delay a run.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peak_memory import Peak

from buckeye import runs
from buckeye.monitor.intervals import student_quantile

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
LAST = 5  # steps whose mean reward is the end of a run
_COMMAND = "#   "
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)


class Interval(NamedTuple):
    """Mean over seeds, and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], *, for_next: bool = False) -> Interval:
    """Return the t interval of the mean; with `for_next`, of the value of one more seed."""
    n, mean = len(values), statistics.fmean(values)
    half = student_quantile(n - 1) * statistics.stdev(values) * (1 / n + for_next) ** 0.5
    return Interval(round(mean, 4), round(mean - half, 4), round(mean + half, 4))


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.parent.name for path in RECIPES.glob("*/run.toml"))


def commands(recipe: Path) -> tuple[list[str], list[str]]:
    """Return the commands that prepare a run, and those of the run."""
    text = re.sub(r"\\\n# +", "", (recipe / "run.toml").read_text())
    lines = [line.removeprefix(_COMMAND) for line in text.splitlines() if line.startswith(_COMMAND)]
    first = next(i for i, line in enumerate(lines) if line.endswith("&") or line.startswith("rl @"))
    return lines[:first], lines[first:]


def prepare(recipe: Path, folder: Path) -> None:
    """Copy a recipe to `folder`, and run the commands before its training, unless it is done."""
    files = [file.name for file in recipe.iterdir() if file.is_file() and file.name != "expected.json"]
    is_current = filecmp.cmpfiles(recipe, folder, files, shallow=False)[0] == files
    if is_current and (folder / "prepared.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(recipe, folder, ignore=shutil.ignore_patterns("outputs", "expected.json"))
    cost = run(folder, commands(recipe)[0])
    (folder / "prepared.json").write_text(json.dumps(cost))


def train(folder: Path, seed: int) -> Path:
    """Train with a seed in a folder that `prepare` made, unless it is done. Return the run directory."""
    out = folder / "outputs" / f"seed-{seed}"
    record = out / "recipe.json"
    if not record.exists():
        shutil.rmtree(out, ignore_errors=True)
        words = f"--orchestrator.seed {seed} --output-dir outputs/seed-{seed}"
        lines = [f"{line} {words}" if line.startswith("rl @") else line for line in commands(folder)[1]]
        cost = run(folder, lines)
        record.write_text(json.dumps(cost))
    return out


def run(folder: Path, lines: Sequence[str]) -> Mapping[str, float]:
    """Run a script. Return its processor time in seconds, its time, and its peak of memory in GB."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    script = "\n".join(["trap 'jobs -p | xargs -r kill || :; wait' EXIT", *lines])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "recipe.log").open("ab") as log:
        child = subprocess.Popen(
            ["bash", "-ec", script], cwd=folder, stdout=log, stderr=log, env={**os.environ, "PATH": path}
        )
        peak = Peak(child.pid)
        peak.start()
        code = child.wait()
    if code:
        sys.exit(f"error: exit code {code}\n  at {folder / 'recipe.log'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "processor": round(used),
        "seconds": round(time.monotonic() - started),
        "memory": round(peak.stop(), 2),
    }


def rewards(out: Path) -> list[float]:
    """Return the mean reward of each step of a run."""
    return [round(step.reward, 4) for step in runs.open(out).steps if step.reward is not None]


def ends(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the reward of the start model and that of the last steps, per seed."""
    return [curve[0] for curve in curves], [statistics.fmean(curve[-LAST:]) for curve in curves]


def expected(name: str) -> dict[str, Any] | None:
    """Return the expected curve of a recipe, or None."""
    file = RECIPES / name / "expected.json"
    return json.loads(file.read_text()) if file.exists() else None


def measure(name: str, seeds: int, folder: Path) -> None:
    """Train the missing seeds of a recipe, and write its expected curve if there are several."""
    prepare(RECIPES / name, folder)
    outs = []
    for seed in range(seeds):
        outs.append(train(folder, seed))
        print(f"{name} seed {seed}: {rewards(outs[-1])}", flush=True)
    if seeds < 2:
        return
    costs = [json.loads((out / "recipe.json").read_text()) for out in outs]
    before = json.loads((folder / "prepared.json").read_text())
    curves = [rewards(out) for out in outs]
    start, end = (interval(values)._asdict() for values in ends(curves))
    record = {
        "made_by": f"python -m benchmarks.recipes {name} --seeds {seeds}",
        "day": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "start": start,
        "end": end,
        "processor_seconds": before["processor"] + statistics.median(cost["processor"] for cost in costs),
        "memory_gb": max(cost["memory"] for cost in [before, *costs]),
        "curves": curves,
    }
    lines = json.dumps(record, indent=1)
    lines = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), lines)
    (RECIPES / name / "expected.json").write_text(lines + "\n")


def table() -> str:
    """Return the recipes as a Markdown table."""
    lines = [
        "| recipe | shows | reward at first | at the end | steps | processor time | memory |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for name in names():
        shows = (RECIPES / name / "run.toml").read_text().splitlines()[0].removeprefix("# ")
        found, cells = expected(name), ["not measured", "", "", "", ""]
        if found:
            both = ["{mean:.2f} [{low:.2f}, {high:.2f}]".format(**found[key]) for key in ("start", "end")]
            steps, seconds = len(found["curves"][0]), found["processor_seconds"]
            cells = [*both, str(steps), f"{seconds:.0f} s", f"{found['memory_gb']:.1f} GB"]
        lines.append(f"| [{name}]({name}/run.toml) | {shows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """Return the expected curves as SVG: the mean over seeds, and the 95 % interval of one more seed."""
    panels = []
    measured = {name: found["curves"] for name in names() if (found := expected(name))}
    for number, (name, curves) in enumerate(measured.items()):
        steps = list(zip(*curves, strict=True))
        bands = [interval(values, for_next=True) for values in steps]

        def path(values: Sequence[float], count: int = len(steps)) -> list[str]:
            spots = ((200 * i / (count - 1), 90 * (1 - min(1, max(0, v)))) for i, v in enumerate(values))
            return [f"{x:.0f},{y:.0f}" for x, y in spots]

        band = path([one.low for one in bands]) + path([one.high for one in bands])[::-1]
        mean = path([one.mean for one in bands])
        panels.append(
            f'<g transform="translate({40 + 250 * (number % 3)},{30 + 150 * (number // 3)})">'
            f'<text y="-8">{name}</text><path d="M0,0V90H200" fill="none" stroke="#888"/>'
            f'<text x="-6" y="8" text-anchor="end">1</text><text x="-6" y="92" text-anchor="end">0</text>'
            f'<text x="200" y="106" text-anchor="end">step {len(steps)}</text>'
            f'<polygon points="{" ".join(band)}" fill="#7ab" opacity=".5"/>'
            f'<polyline points="{" ".join(mean)}" fill="none" stroke="#036" stroke-width="2"/></g>'
        )
    height = 150 * -(-len(panels) // 3)
    size = f'viewBox="0 0 770 {height}" font-family="sans-serif" font-size="13"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([start, f'<rect width="770" height="{height}" fill="#fff"/>', *panels, "</svg>"]) + "\n"


def write_page() -> None:
    """Write the table of recipes/README.md, and the picture."""
    page = RECIPES / "README.md"
    page.write_text(_TABLE.sub(lambda _: table(), page.read_text()))
    (RECIPES / "curves.svg").write_text(picture())


def main() -> None:
    """Measure the given recipes, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names()])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("outputs/recipes"))
    given = parser.parse_args()
    for name in given.names:
        measure(name, given.seeds, given.folder.absolute() / name)
    write_page()


if __name__ == "__main__":
    main()
