"""Certify and attack all environments of a library, one process at a time, and write one table."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buckeye.base.columns import markdown_table
from buckeye.base.json_lines import printable, read_json_lines
from buckeye.base.process import PYTHON, ChildProcess, run_program
from buckeye.base.storage import read_json, write_file
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import BuckeyeError, UsageError
from buckeye.evaluation.attack.policy import EVERY_TASK
from buckeye.evaluation.attack.report import AttackOptions
from buckeye.evaluation.attack.search import attack_environment
from buckeye.evaluation.certify.certificate import certify, write_certificate
from buckeye.evaluation.checks.result import shortened
from buckeye.evaluation.env_check import CheckOptions
from buckeye.workers.loading import find_interpreter, open_environment

_LIST_SECONDS, _END_SECONDS = 300.0, 2.0
_LISTS = {
    "reasoning-gym": "from reasoning_gym.factory import DATASETS as names",
    "textarena": """
import textarena
names = []
for name in textarena.envs.registration.ENV_REGISTRY:
    if name.endswith("-v0"):
        try:
            textarena.make(name).reset(num_players=1, seed=0)
        except (AssertionError, ValueError):  # it needs more players, or a key
            continue
        except Exception:  # the row of the environment has the reason
            pass
        names.append(name)
""",
    "skyrl-gym": "from skyrl_gym import registry as names",
}
"""Programs that list all environments of a library as `names`; of textarena, the games for one player."""
_HEADER = (
    "environment",
    "certificate",
    "content-free",
    "chance",
    "exploit",
    "reward",
    "guess",
    "gradings",
    "ms",
)
_ATTACK_KEYS = ("seconds", "gradings", "reward_of_right_answers", "exploits", "grader_errors")
_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyOptions:
    """Environment arguments; limits of an attack; rollouts of a certificate in seconds, and its sessions.

    `timeout` is the maximum number of seconds for an environment.
    """

    args: Mapping[str, Any]
    attack: float
    gradings: int
    budget: float
    sessions: int
    timeout: float


def environments_of(library: str) -> list[str]:
    """Return the ids of all environments of a library. Raise `UsageError` for another library."""
    if library not in _LISTS:
        raise UsageError(
            f"cannot list the environments of {library!r}",
            code="BK-CLI-ARGUMENT",
            hint=f"choose {' or '.join(_LISTS)}; certify others with `buckeye env check --certify`",
        )
    program = f"{_LISTS[library]}\nprint('\\n', *sorted(names), sep='\\n')"
    argv = [str(find_interpreter(f"{library}/", WorkerSettings())), "-I", "-c", program]
    done = run_program(argv, seconds=_LIST_SECONDS)
    if done.returncode:
        raise UsageError(
            f"cannot list the environments of {library}: {done.stderr.strip()[-200:]}", code="BK-ENV-LOAD"
        )
    names = done.stdout.rpartition("\n\n")[2].split()  # games print, too
    return [f"{library}/{name}" for name in names]


def survey(
    ids: Sequence[str], folder: Path, options: SurveyOptions, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Certify and attack environments, and return their rows.

    `folder` receives `survey.jsonl`, `survey.md` and the certificates. Environments in `survey.jsonl` are not
    tried again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "survey.jsonl"
    rows = list(read_json_lines(lines)) if lines.exists() else []
    known = {row["environment"] for row in rows}
    for number, env_id in enumerate(ids, start=1):
        if env_id in known:
            continue
        progress(f"{number} of {len(ids)}: {env_id}")
        rows.append(_row(env_id, folder, options))
        write_file(lines, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_file(folder / "survey.md", f"# Survey\n\n{survey_table(rows)}")
    return rows


def _row(env_id: str, folder: Path, options: SurveyOptions) -> dict[str, Any]:
    """Return the figures of an attack and of a certificate, or the reason why one is missing as `error`."""
    paths = [folder / f"{env_id.replace('/', '_')}{suffix}" for suffix in (".attack.json", ".json")]
    for path in paths:
        path.unlink(missing_ok=True)
    request = {"id": env_id, "paths": list(map(str, paths)), "options": asdict(options)}
    argv = [*PYTHON, "-m", __name__, json.dumps(request)]
    with tempfile.TemporaryFile() as errors:
        child = ChildProcess(argv, stdout=subprocess.DEVNULL, stderr=errors.fileno(), guarded=True)
        try:
            ended = f"exit code {child.wait(options.timeout)}"
            errors.seek(0)
            reason = _first_error(errors.read().decode(errors="replace")) or ended
        except subprocess.TimeoutExpired:
            reason = f"more than {options.timeout:g} s"
        finally:
            child.end(_END_SECONDS, session=True)
    row: dict[str, Any] = {"environment": env_id, "args": dict(options.args)}
    row["attack"], row["certificate"] = {"error": reason}, {"verdict": "not run", "error": reason}
    if paths[0].exists():
        row["attack"] = {name: value for name, value in read_json(paths[0]).items() if name in _ATTACK_KEYS}
    if paths[1].exists():
        row["certificate"] = _figures(read_json(paths[1]))
    return row


def _figures(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a certificate that the table shows."""
    checks = {check["name"]: check for check in certificate["checks"]}
    content_free, cost = (
        checks.get(name, {}).get("measured", {}) for name in ("content-free policies", "cost")
    )
    return {
        "verdict": certificate["verdict"],
        "findings": {n: c["detail"] for n, c in checks.items() if c["verdict"] in ("fail", "warn")},
        "baseline": content_free.get("reward"),
        "chance": content_free.get("chance"),
        "processor_ms": cost.get("processor_ms"),
        "wall_ms": cost.get("wall_ms"),
        "version": certificate["package"]["version"],
    }


def survey_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    return markdown_table(_HEADER, (_cells(row["environment"], row) for row in rows))


def _cells(env_id: str, row: Mapping[str, Any]) -> list[str]:
    certificate, attack = row["certificate"], row["attack"]
    reason = certificate.get("error") or ", ".join(certificate["findings"])
    best = next(iter(attack.get("exploits", ())), None)
    exploit = "none" if best is None else shown_exploit(best)
    return [
        env_id,
        f"{certificate['verdict']}: {reason}" if reason else certificate["verdict"],
        *(_number(certificate.get(name)) for name in ("baseline", "chance")),
        attack.get("error") or exploit,
        *(_number(best and best[name]) for name in ("reward", "baseline")),
        f"{attack.get('gradings', 0):,}",
        _number(certificate.get("processor_ms")),
    ]


def shown_exploit(exploit: Mapping[str, Any]) -> str:
    """Return the text of an exploit as Markdown, with the tasks that it is for, if not for all."""
    label = "" if exploit["label"] == EVERY_TASK else f" for {exploit['label']}"
    return f"`` {shortened(printable(repr(exploit['text'])), _SHOWN)} ``{label}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _first_error(output: str) -> str:
    """Return the first error that a program printed, or else its last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return shortened(next(iter(errors + lines[::-1]), ""), 200)


async def _certify_and_attack(env_id: str, paths: Sequence[Path], options: SurveyOptions) -> None:
    """Write the report of an attack, which ends in time, and then the certificate."""
    environment = open_environment(env_id, options.args, WorkerSettings())
    try:
        report = await attack_environment(
            environment, AttackOptions(budget=options.attack, max_gradings=options.gradings)
        )
        write_file(paths[0], json.dumps(report.to_json(), ensure_ascii=False))
    except BuckeyeError as error:
        print(f"error: {error}", file=sys.stderr)
    checks = CheckOptions(budget=options.budget)
    certificate = await certify(environment, env_id, options.args, checks, sessions=options.sessions)
    write_certificate(certificate, paths[1], None)


def _main(request: Mapping[str, Any]) -> None:
    """Certify and attack one environment. `_row` starts this program."""
    options = SurveyOptions(**request["options"])
    try:
        asyncio.run(_certify_and_attack(request["id"], list(map(Path, request["paths"])), options))
    except BuckeyeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
