"""Virtual environments, and installation into them with `uv` if available, else with `pip`.

Every command names the interpreter, so the virtual environment does not need to be active.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from buckeye.base.process import ChildProcess, run_program
from buckeye.errors import BuckeyeError, UsageError

INSTALL_SECONDS = 3600.0
_VENV_SECONDS = 300.0
_LAST_LINES = 12
_NETWORK_SIGNS = ("dns error", "client error (Connect)", "NewConnectionError", "ConnectTimeoutError")
"""Texts in the output of uv and pip if an index cannot be reached."""
_PYTHON_MISMATCH = re.compile(
    r"does not satisfy Python\s*([<>=!~][^\s,]*(?:,\s?[<>=!~][^\s,]*)*)"  # uv
    r"|requires a different Python: \S+ not in '([^']+)'"  # pip
    r"|Requires-Python ([<>=!~][^;]+?)(?:;|\s[A-Za-z]|$)"
)
_PYTHONS = range(8, 16)
_LATEST_PATCH = 99


@dataclass(slots=True)
class Installer:
    """Installer for the virtual environment `venv`, with `uv` if given, else with pip.

    `hashes` has the SHA-256 of the installed archives by canonical name, if the installer reports them.
    """

    venv: Path
    uv: str | None
    hashes: dict[str, list[str]] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Interpreter of the virtual environment."""
        return self.venv / "bin" / "python"

    @property
    def name(self) -> str:
        return "uv" if self.uv else "pip"

    def create(self, python: str | None) -> None:
        """Create the virtual environment with `python`: a path, a command or a version. None: this Python.

        Raises BuckeyeError if the installer fails. Raises UsageError if pip is used and the interpreter is
        missing.
        """
        if self.uv:
            command = [self.uv, "venv", "--quiet", "--no-project", "--python", python or _base_python()]
            _run([*command, str(self.venv)], _VENV_SECONDS)
            return
        without_pip = ["--without-pip"] if _has_pip() else []
        _run([_interpreter(python), "-m", "venv", *without_pip, str(self.venv)], _VENV_SECONDS)

    def install(
        self,
        *requirements: str,
        index: str | None = None,
        is_exclusive: bool = False,
        constraints: Sequence[str] = (),
        dependencies: bool = True,
        folder: Path,
    ) -> None:
        """Install requirements. Raises BuckeyeError with the last output of the installer.

        The package index `index` is used in addition to the default index, or alone with `is_exclusive`.
        Temporary files go into `folder`.
        """
        options = [] if dependencies else ["--no-deps"]
        if constraints:
            constraints_file = folder / "constraints.txt"
            constraints_file.write_text("\n".join(constraints) + "\n", encoding="utf-8")
            options += ["--constraint", str(constraints_file)]
        if self.uv:
            index_options = _uv_index(index, is_exclusive=is_exclusive)
            command = [self.uv, "pip", "install", "--quiet", "--python", str(self.python)]
            _run([*command, *options, *index_options, *requirements])
            return
        report = folder / "report.json"
        index_options = ["--index-url" if is_exclusive else "--extra-index-url", index] if index else []
        options += ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
        _run([*self._pip(), "install", "--report", str(report), *options, *index_options, *requirements])
        self.hashes |= _hashes_of_report(json.loads(report.read_text("utf-8")))

    def find_hashes(self, pins: Sequence[str], *, index: str | None, folder: Path) -> None:
        """Get the hashes of `pins` (NAME==VERSION) from `uv`; with `pip`, `install` has recorded them.

        If `uv` fails, `hashes` stays unchanged.
        """
        if not self.uv:
            return
        pins_file = folder / "pins.txt"
        pins_file.write_text("\n".join(pins) + "\n", encoding="utf-8")
        command = [self.uv, "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header"]
        completed = _run_guarded(
            [*command, "--python", str(self.python), *_uv_index(index), str(pins_file)],
            seconds=INSTALL_SECONDS,
        )
        if completed.returncode == 0:
            self.hashes |= _hashes_of_lock(completed.stdout)

    def distributions(self) -> list[metadata.Distribution]:
        """Return the installed distributions, sorted by name."""
        site = [str(path) for path in self.venv.glob("lib/python*/site-packages")]
        return sorted(metadata.distributions(path=site), key=lambda d: canonicalize_name(d.name))

    def distribution(self, name: str) -> metadata.Distribution:
        """Return the distribution with this canonical name. Raises BuckeyeError if it is not installed."""
        for found in self.distributions():
            if canonicalize_name(found.name) == name:
                return found
        raise BuckeyeError(f"{self.name} did not install a distribution {name}", code="BK-ENV-INSTALL")

    def python_version(self) -> str:
        """Return the version of the interpreter, such as 3.11.7."""
        text = (self.venv / "pyvenv.cfg").read_text("utf-8")
        match = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", text, re.M)
        return match[1] if match else "unknown"

    def _pip(self) -> list[str]:
        if _has_pip():
            return [sys.executable, "-m", "pip", "--python", str(self.python)]
        return [str(self.python), "-m", "pip"]


def find_needed_python(output: str) -> tuple[str, str] | None:
    """Return the required Python if an installer failed because of the interpreter's version, else None.

    This is the specifier of the package, and the supported release nearest to the running Python.
    """
    found = _PYTHON_MISMATCH.search(re.sub(r"\s*\n[\s|]*", " ", output))
    if found is None:
        return None
    text = next(filter(None, found.groups())).rstrip(" ,")
    try:
        specifier = SpecifierSet(text)
    except InvalidSpecifier:
        return None
    current_minor = sys.version_info.minor
    for minor in sorted(_PYTHONS, key=lambda minor: abs(minor - current_minor)):
        if any(specifier.contains(f"3.{minor}.{patch}") for patch in (0, _LATEST_PATCH)):
            return text, f"3.{minor}"
    return None


def find_uv() -> str | None:
    """Return the path of `uv` on PATH or next to this interpreter, or None."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _base_python() -> str:
    """Return the base interpreter, because a new virtual environment must not depend on the current one."""
    return str(getattr(sys, "_base_executable", sys.executable))


def _interpreter(python: str | None) -> str:
    if python is None:
        return _base_python()
    for candidate in (python, f"python{python}"):
        found = shutil.which(os.path.expanduser(candidate))
        if found is not None and run_program([found, "-c", ""], seconds=60).returncode == 0:
            return found
    raise UsageError(
        f"--python: no interpreter {python!r} on this machine",
        code="BK-CLI-ARGUMENT",
        hint="pass the path of an interpreter, or install `uv` (https://docs.astral.sh/uv), which downloads "
        "any version",
    )


def _uv_index(index: str | None, *, is_exclusive: bool = False) -> list[str]:
    return [] if index is None else ["--default-index" if is_exclusive else "--index", index]


def _run(command: Sequence[str], seconds: float = INSTALL_SECONDS) -> None:
    name = "uv" if Path(command[0]).name == "uv" else "pip" if "pip" in command else "venv"
    try:
        completed = _run_guarded(command, seconds)
    except subprocess.TimeoutExpired:
        raise BuckeyeError(f"`{name}` did not end within {seconds:g} s", code="BK-ENV-INSTALL") from None
    except OSError as error:
        raise BuckeyeError(
            f"cannot start `{name}`: {error.strerror or error}", code="BK-ENV-INSTALL"
        ) from None
    if completed.returncode:
        lines = [line for line in (completed.stderr or completed.stdout).splitlines() if line.strip()]
        last = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
        if any(sign in last for sign in _NETWORK_SIGNS):
            code, hint = "BK-NETWORK", "check the network, and retry"
        else:
            code, hint = "BK-ENV-INSTALL", f"fix what `{name}` reports, and retry"
        raise BuckeyeError(f"`{name}` failed:\n{last}", code=code, hint=hint)


def _run_guarded(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run an installer. When it or this process ends, kill its children, so that none keeps writing files.

    Raises TimeoutExpired and OSError.
    """
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        child = ChildProcess(command, stdout=stdout, stderr=stderr, guarded=True)
        try:
            code = child.wait(seconds)
        finally:
            child.signal(signal.SIGKILL, session=True)
            child.wait()
        for output in (stdout, stderr):
            output.seek(0)
        texts = [output.read().decode(errors="replace") for output in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *texts)


def _hashes_of_report(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hashes of a `pip install --report` file. Folders and repositories have none."""
    found: dict[str, list[str]] = {}
    for item in report.get("install", ()):
        digest = item.get("download_info", {}).get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest:
            found[canonicalize_name(item["metadata"]["name"])] = [f"sha256:{digest}"]
    return found


def _hashes_of_lock(text: str) -> dict[str, list[str]]:
    """Return the hashes in a requirements file."""
    found: dict[str, list[str]] = {}
    for entry in text.replace("\\\n", " ").splitlines():
        name, equals, _ = entry.partition("==")
        hashes = re.findall(r"--hash=(\w+:[0-9a-f]+)", entry)
        if equals and hashes:
            found[canonicalize_name(name.strip())] = hashes
    return found
