"""`buckeye rl tune`: the words, and what is printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buckeye.base.columns import aligned
from buckeye.base.json_lines import printable
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.run_files.known_runs import find_run
from buckeye_audit.tuning.search import STEPS

if TYPE_CHECKING:
    from buckeye_audit.tuning.forks import Fork, Origin
    from buckeye_audit.tuning.tune import Tuned

HELP = f"""\
usage: rl tune CONFIG ... [--budget TIME] [--steps N] [--from RUN [--step N|last|best]] [-o DIR] [--json]

Finds a learning rate and a warm-up for a run by short forks of it: first by how far rates move the policy in
a step, on batches that all share, then by what they earn. CONFIG is what `rl` takes: `@ run.toml`, flags. The
setting is written into a new file, which nothing else reads.

  --budget TIME   about how long, as 90s, 10m or 1h (default 10m)
  --steps N       steps of a fork (default: as many as there is time for, {STEPS} at least)
  --from RUN      begin at a checkpoint of a run, not at the start
  --step N        which one: a number, last or best (default last)
  -o, --output    a new folder (default: OUTPUT_DIR-tune)
  --json          print one JSON object

Exit code 0 if a setting was written, 1 if there was nothing to learn from, 2 for wrong usage."""

_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_NAMES = {"-o": "output", "--output": "output"} | {f"--{n}": n for n in ("budget", "steps", "from", "step")}


@dataclass(frozen=True, slots=True)
class _Words:
    """The flags of the command, and the words of the configuration."""

    flags: dict[str, str]
    settings: list[str]
    as_json: bool


def run_tune(words: Sequence[str], load: Callable[[list[str]], RLConfig]) -> int:
    """Find a setting and print it; returns the exit code. `load` reads a configuration."""
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    given = _own_flags(words)
    budget, steps = _seconds(given.flags.get("budget", "10m")), _steps(given.flags.get("steps"))
    if not given.settings:
        raise UsageError("`rl tune` needs a configuration, as `rl` takes it: buckeye rl tune @ run.toml")
    if "step" in given.flags and "from" not in given.flags:
        raise UsageError("`rl tune --step` is a checkpoint of a run: name it with --from RUN")
    config = load(given.settings)
    if config.dry_run or config.resume or config.clean:
        raise UsageError("`rl tune` makes runs of its own: leave --dry-run, --resume and --clean out")
    from buckeye.base.distribution import need
    from buckeye.base.process import idle_spins

    need("torch", "Tuning")
    os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=False)  # read when torch is imported
    from buckeye_audit.tuning.forks import origin_of
    from buckeye_audit.tuning.tune import Tuning

    run = find_run(given.flags["from"]) if "from" in given.flags else None
    out = config.output_dir.absolute()
    tuning = Tuning(
        config=config,
        origin=origin_of(run, given.flags.get("step", "last")),
        root=Path(given.flags.get("output", out.with_name(f"{out.name}-tune"))).absolute(),
        budget=budget,
        steps=steps,
        tell=lambda line: print(printable(line), file=sys.stderr, flush=True),
    )
    found = tuning.run()
    print(
        json.dumps(_as_object(found))
        if given.as_json
        else _text(found, _to_train(found, given.settings, tuning.origin))
    )
    return 0


def _own_flags(words: Sequence[str]) -> _Words:
    flags, settings = dict[str, str](), list[str]()
    pending = iter(words)
    for word in pending:
        name, equals, value = word.partition("=")
        if name in _NAMES:
            given = value if equals else next(pending, "")
            if not given or given.startswith("--"):
                raise UsageError(f"`rl tune {name}` needs a value. `rl tune --help` explains it")
            flags[_NAMES[name]] = given
        elif word != "--json":
            settings.append(word)
    return _Words(flags, settings, "--json" in words)


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"`rl tune --budget`: {text!r} is no time, such as 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _steps(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 2:
        raise UsageError(f"`rl tune --steps`: {text!r} is not a number of steps from 2 on")
    return int(text)


def _to_train(found: Tuned, settings: Sequence[str], origin: Origin) -> str:
    """What to type to train with the setting, from where the forks have begun."""
    file = ["@", str(found.file)]
    if origin.run is None:
        return shlex.join(["buckeye", "rl", *settings, *file])
    run, step = str(origin.run.absolute()), str(origin.step)
    fork = shlex.join(["buckeye", "rl", "fork", run, "--step", step])
    return f"{fork} && {shlex.join(['buckeye', 'rl', 'resume', f'{run}-from-step-{step}', *file])}"


def _text(found: Tuned, command: str) -> str:
    changes = [(f"  {rate:.2e}", f"{change:.2g}") for rate, change in sorted(found.changes.items())]
    forks = [
        (f"  {fork.rate:.2e}", *_outcome(fork)) for fork in sorted(found.forks, key=lambda one: one.rate)
    ]
    how = (
        "is where forks earned most"
        if found.sure
        else "moves the policy as far as is usual; no fork has shown that it learns"
    )
    parts = [
        aligned([("lr", "KL a step"), *changes]),
        aligned([("lr", f"reward, at first {found.at_start:.4g}", ""), *forks]) if forks else "",
        _curves(found.forks),
        f"lr {found.rate:.2e} {how}; warm-up: {found.warmup} steps.\nTo train with it: {command}",
    ]
    return "\n\n".join(filter(None, parts))


def _outcome(fork: Fork) -> tuple[str, str]:
    if fork.score is None:
        return "-", printable(fork.why)
    return f"{fork.score:.4g}", "lost again what it had gained" if fork.fell else ""


def _curves(forks: Sequence[Fork]) -> str:
    """The rewards of the forks by step."""
    from buckeye.monitor.metrics import read_run
    from buckeye_audit.curve import MARKS, Curve, text_plot

    found = [
        Curve(f"{fork.rate:.2e}", points)
        for fork in sorted(forks, key=lambda one: one.rate)
        if (points := read_run(fork.directory / "metrics.jsonl").values("orchestrator/reward/mean"))
    ]
    if not found:
        return ""
    legend = "  ".join(f"{mark} {one.name}" for mark, one in zip(MARKS, found, strict=False))
    return "\n".join([*text_plot(found), f"reward by step: {legend}"])


def _as_object(found: Tuned) -> dict[str, object]:
    forks = [
        {"lr": one.rate, "run": str(one.directory), "reward": one.score, "fell": one.fell, "why": one.why}
        for one in found.forks
    ]
    return {
        "lr": found.rate,
        "warmup": found.warmup,
        "by_training": found.sure,
        "reward_at_start": found.at_start,
        "changes": [{"lr": rate, "kl": change} for rate, change in found.changes.items()],
        "forks": forks,
        "file": str(found.file),
    }
