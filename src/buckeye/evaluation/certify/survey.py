"""Certify all environments of a library, one process each, and write one table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base.json_lines import read_json_lines
from buckeye.base.process import run_program
from buckeye.base.storage import read_json, write_file
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import UsageError
from buckeye.workers.loading import find_interpreter

_LIST_SECONDS = 120.0
_LISTS = {
    "reasoning-gym": "from reasoning_gym.factory import DATASETS as names; print(*names)",
    "textarena": "from textarena.envs.registration import ENV_REGISTRY as r; "
    "print(*(name for name in r if name.endswith('-v0')))",
}
"""Programs that print the names of all environments of a library."""
_HEADER = ("environment", "verdict", "findings", "baseline", "chance", "processor ms")


def environments_of(library: str) -> list[str]:
    """Return the ids of all environments of a library. Raise `UsageError` for another library."""
    if library not in _LISTS:
        raise UsageError(
            f"cannot list the environments of {library!r}",
            code="BK-CLI-ARGUMENT",
            hint=f"choose {' or '.join(_LISTS)}; certify others with `buckeye env check --certify`",
        )
    argv = [str(find_interpreter(f"{library}/", WorkerSettings())), "-I", "-c", _LISTS[library]]
    done = run_program(argv, seconds=_LIST_SECONDS)
    if done.returncode:
        raise UsageError(
            f"cannot list the environments of {library}: {done.stderr.strip()[-200:]}", code="BK-ENV-LOAD"
        )
    return [f"{library}/{name}" for name in sorted(done.stdout.split())]


def survey(
    ids: Sequence[str], folder: Path, flags: Sequence[str], seconds: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Certify environments, each for at most `seconds`, and return their rows.

    `folder` receives `survey.jsonl`, `survey.md` and the certificates. Environments in `survey.jsonl` are not
    certified again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "survey.jsonl"
    rows = list(read_json_lines(lines)) if lines.exists() else []
    known = {row["environment"] for row in rows}
    for number, env_id in enumerate(ids, start=1):
        if env_id in known:
            continue
        progress(f"{number} of {len(ids)}: {env_id}")
        rows.append(_row(env_id, folder / f"{env_id.replace('/', '_')}.json", flags, seconds))
        write_file(lines, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_file(folder / "survey.md", survey_page(rows))
    return rows


def _row(env_id: str, path: Path, flags: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of a new certificate, or the reason why none was made as `error`."""
    argv = [sys.executable, "-m", "buckeye", "env", "check", env_id, "--certify", "--out", str(path), *flags]
    path.unlink(missing_ok=True)
    try:
        done = run_program(argv, seconds=seconds)
    except subprocess.TimeoutExpired:
        return {"environment": env_id, "verdict": "not run", "error": f"more than {seconds:g} s"}
    if not path.exists():
        return {"environment": env_id, "verdict": "not run", "error": _first_error(done.stderr)}
    certificate = read_json(path)
    checks = {check["name"]: check for check in certificate["checks"]}
    content_free, cost = (
        checks.get(name, {}).get("measured", {}) for name in ("content-free policies", "cost")
    )
    return {
        "environment": env_id,
        "verdict": certificate["verdict"],
        "findings": {n: c["detail"] for n, c in checks.items() if c["verdict"] in ("fail", "warn")},
        "baseline": content_free.get("reward"),
        "chance": content_free.get("chance"),
        "processor_ms": cost.get("processor_ms"),
        "wall_ms": cost.get("wall_ms"),
        "version": certificate["package"]["version"],
    }


def survey_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    cells = [
        [
            row["environment"],
            row["verdict"],
            row.get("error") or ", ".join(row["findings"]) or "-",
            *(
                "-" if (value := row.get(name)) is None else f"{value:.3g}"
                for name in ("baseline", "chance", "processor_ms")
            ),
        ]
        for row in rows
    ]
    table = [_HEADER, ["---"] * len(_HEADER), *cells]
    return "# Survey\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in table)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    text = lines[0].removeprefix("error: ") if lines else (output.strip().splitlines() or ["no message"])[-1]
    return text.replace("|", "/")[:200]
