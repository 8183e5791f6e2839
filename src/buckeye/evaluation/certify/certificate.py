"""Write, sign and verify certificates of environments."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.columns import counted, markdown_table
from buckeye.base.storage import read_json, write_file
from buckeye.envs.base import Environment
from buckeye.envs.settings import with_variables
from buckeye.errors import BuckeyeError, UsageError
from buckeye.evaluation.certify.identity import changes, identify
from buckeye.evaluation.certify.measures import measure_sessions
from buckeye.evaluation.certify.parity import installed_parity, last_line
from buckeye.evaluation.certify.resources import Measurement, Verdict, rounded
from buckeye.evaluation.checks.result import CheckStatus
from buckeye.evaluation.checks.samples import probes_of
from buckeye.evaluation.env_check import CheckOptions, EnvCheckReport, check_environment
from buckeye.workers import loading
from buckeye.workers.environment import WorkerEnvironment
from buckeye.workers.loading import open_environment

FORMAT = "buckeye-certificate-1"
NAMESPACE = "buckeye-certificate"
"""Namespace of the signature, for `ssh-keygen -Y verify -n`."""
_VERDICTS: Mapping[CheckStatus, Verdict] = {
    "pass": "pass", "note": "pass", "warning": "warn", "error": "fail", "not run": "not run"
}  # fmt: skip
_PAGE_START, _START = "# Certificate of ", 200
_PROGRAM_SECONDS = 120.0


class _Environment(msgspec.Struct):
    id: str
    args: dict[str, Any]
    name: str


class _Package(msgspec.Struct):
    version: str | None
    files: dict[str, str]


class _Tasks(msgspec.Struct):
    count: int
    sha256: str


class _Settings(msgspec.Struct):
    sessions: int
    sample: int
    seed: int
    budget: float
    max_content_free: float
    variables: list[str] = []


class _Certificate(msgspec.Struct):
    """The fields of a certificate that are read again."""

    environment: _Environment
    verdict: str
    package: _Package
    tasks: dict[str, _Tasks]
    settings: _Settings
    date: str


async def certify(
    environment: Environment, env_id: str, args: Mapping[str, Any], options: CheckOptions, *, sessions: int
) -> dict[str, Any]:
    """Run all checks of an opened environment, and return the certificate."""
    report = await check_environment(env_id, args, options, environment)
    settings = with_variables(options.variables)
    if not isinstance(environment, WorkerEnvironment):  # a worker opens it in the same way
        settings = replace(settings, module=loading.__name__)
    probes = probes_of(environment)
    measured, ran = await measure_sessions(env_id, args, settings, probes, sessions, options)
    checks = [*_from_report(report), *measured, installed_parity(env_id, args, ran)]
    return {
        "format": FORMAT,
        "environment": {"id": env_id, "args": dict(args), "name": report.environment},
        "verdict": _worst(checks),
        "checks": [asdict(check) for check in checks],
        **identify(environment, env_id, args),
        "settings": {
            "sessions": sessions,
            "sample": options.sample,
            "budget": options.budget,
            "max_content_free": options.limit,
            "seed": options.seed,
            "variables": list(options.variables),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_certificate(certificate: Mapping[str, Any], path: Path, key: Path | None) -> list[Path]:
    """Write the certificate, its page, and with `key` its signature. Return the paths of these files."""
    page = path.with_suffix(".md")
    write_file(path, json.dumps(certificate, indent=1, ensure_ascii=False) + "\n")
    write_file(page, certificate_page(certificate, path.name))
    signature = Path(f"{path}.sig")
    signature.unlink(missing_ok=True)
    if key is None:
        return [path, page]
    _ssh_keygen(
        ["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(path)], "cannot sign the certificate"
    )
    return [path, page, signature]


def check_output(path: Path) -> None:
    """Raise `UsageError` if another file than a certificate is where the certificate or its page goes."""
    if not path.name or path.suffix == ".md":
        raise UsageError(
            f"{path} is not the name of a certificate; its page has the suffix .md",
            code="BK-CLI-ARGUMENT",
            at="--out",
            hint="name a file such as certificate.json",
        )
    for file, mark in ((path, f'"{FORMAT}"'), (path.with_suffix(".md"), _PAGE_START)):
        is_ours = file.is_file() and mark in file.read_text(encoding="utf-8", errors="replace")[:_START]
        if file.exists() and not is_ours:
            raise UsageError(
                f"{file} exists, and is not a certificate",
                code="BK-FILE-EXISTS",
                hint="set another --out FILE",
            )


def read_certificate(path: Path) -> dict[str, Any]:
    """Return the certificate in a file. Raise `UsageError` for another file or a wrong signature."""
    value = None
    with contextlib.suppress(ValueError):
        value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{path} is not a certificate of this version", code="BK-FILE-FORMAT")
    try:
        msgspec.convert(value, _Certificate)
    except ValueError as error:
        raise UsageError(f"{path} is a damaged certificate: {error}", code="BK-FILE-FORMAT") from None
    signature = Path(f"{path}.sig")
    if signature.exists():
        argv = ["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)]
        _ssh_keygen(argv, f"the signature {signature} does not fit {path}", path.read_bytes())
    return value


def verify_certificate(certificate: Mapping[str, Any]) -> list[str]:
    """Compare the hashes with the installed environment, and return the changes as lines."""
    env_id, args = certificate["environment"]["id"], certificate["environment"]["args"]
    variables = certificate["settings"].get("variables", ())
    environment = open_environment(env_id, args, with_variables(variables))
    return changes(certificate, identify(environment, env_id, args))


def renewal_command(certificate: Mapping[str, Any], path: Path) -> str:
    """Return the command that makes the certificate again."""
    environment, settings = certificate["environment"], certificate["settings"]
    argv = ["buckeye", "env", "check", environment["id"], "--certify", "--out", str(path)]
    argv += ["--args", json.dumps(environment["args"])] if environment["args"] else []
    for name in ("sessions", "budget", "sample", "seed", "max_content_free"):
        argv += [f"--{name.replace('_', '-')}", str(settings[name])]
    if variables := settings.get("variables"):
        argv += ["--variables", ",".join(variables)]
    return shlex.join(argv)


def certificate_page(certificate: Mapping[str, Any], file: str) -> str:
    """Return the certificate as a Markdown page."""
    package, versions = certificate["package"], certificate["versions"]
    rows = [
        (check["name"], check["verdict"], check["detail"].replace("<", "\\<"))
        for check in certificate["checks"]
    ]
    tasks = [(split, f"{t['count']:,}", f"`{t['sha256']}`") for split, t in certificate["tasks"].items()]
    return "\n".join(
        [
            f"{_PAGE_START}{certificate['environment']['name']}: {certificate['verdict']}",
            "",
            markdown_table(("check", "verdict", "measured"), rows),
            f"Made on {certificate['date']} with Buckeye {versions['buckeye']} and Python "
            f"{versions['python']}. Version {package['version'] or 'unknown'}, "
            f"{counted(len(package['files']), 'file')} with the hash `{package['sha256']}`.",
            "",
            markdown_table(("tasks", "number", "SHA-256"), tasks),
            f"Compare it with the installed environment: `buckeye env check --verify {file}`",
            "",
        ]
    )


def _worst(checks: Sequence[Measurement]) -> Verdict:
    """Return the worst verdict; without sessions, an environment does not pass."""
    found = {check.verdict for check in checks}
    has_sessions = any(check.name == "determinism" and check.verdict != "not run" for check in checks)
    return "fail" if "fail" in found else "warn" if "warn" in found else "pass" if has_sessions else "not run"


def _from_report(report: EnvCheckReport) -> list[Measurement]:
    """Return the checks of `buckeye env check` as measurements."""
    known = [score for score in report.scores if not math.isnan(score.mean)]
    best = max(known, key=lambda score: score.mean - report.chance[score.group], default=None)
    numbers: dict[str, dict[str, float]] = {
        "probes": {"probes": len(report.probes), "wrong": sum(not p.is_expected for p in report.probes)},
        "every reply is graded": {"rollouts": report.rollouts, "errored": report.errored},
    }
    for bias in report.judge:
        values = {"value": bias.value, "low": bias.low, "high": bias.high, "calls": bias.calls}
        numbers.setdefault(f"{bias.kind} bias of the judge", {name: rounded(v) for name, v in values.items()})
    if best is not None:
        chance = report.chance[best.group]
        numbers["content-free policies"] = {"reward": round(best.mean, 4), "chance": round(chance, 4)}
    return [
        Measurement(check.name, _VERDICTS[check.status], check.detail, numbers.get(check.name, {}))
        for check in report.checks
    ]


def _ssh_keygen(args: Sequence[str], problem: str, data: bytes | None = None) -> None:
    """Run `ssh-keygen`, which asks on the terminal for a passphrase. Raise `BuckeyeError` if it fails."""
    try:
        done = _run(["ssh-keygen", *args], data)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuckeyeError(
            f"{problem}: {error}", code="BK-CERTIFICATE-SIGNATURE", hint="install OpenSSH"
        ) from None
    if done.returncode:
        raise BuckeyeError(f"{problem}: {last_line(done.stderr)}", code="BK-CERTIFICATE-SIGNATURE")


def _run(argv: Sequence[str], data: bytes | None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S603, an argument list without a shell
        argv, input=data, capture_output=True, timeout=_PROGRAM_SECONDS, check=False
    )
