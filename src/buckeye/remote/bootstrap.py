"""Set-up of another machine for training, in numbered steps.

Each step leaves a marker named after the hash of its inputs. A second run, or one after a lost connection,
skips finished steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from buckeye.base.distribution import requirements
from buckeye.errors import RemoteError
from buckeye.inference.vllm.interpreter import SUPPORTED_VLLM_VERSIONS
from buckeye.remote import scripts
from buckeye.remote.connection import LostConnectionError, SshConnection
from buckeye.remote.environments import NeededEnvironment
from buckeye.remote.software import code_files, pinned_requirements, torch_version
from buckeye.remote.upload import make_tar

_SECONDS = 2400.0
_PATIENCE = 600.0
_CUTS = 5
_VENV, _VLLM, _INSTALLED = "environment", "vLLM", "environments"
_TORCH_INDEX = "https://download.pytorch.org/whl"
_SAID = "buckeye: "
EXTRAS = ("train", "mcp")
"""Extras of Buckeye that every machine gets; a run adds its own."""
TOOLS = ("uv>=0.9",)
"""Programs that users expect on a machine that Buckeye has set up."""


@dataclass(frozen=True, slots=True)
class SetupStep:
    """One step: title, hash of its inputs, script, and standard input of the script."""

    title: str
    key: str
    script: str
    data: bytes = b""

    def text(self) -> str:
        """Return the script with its lock. It does nothing if the step is finished."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.title.lower())
        marker = f'"$root/done/{slug}-{self.key}"'
        lock = f'"$root/done/{slug}.lock"'
        return (
            f"{scripts.PRELUDE}exec 9>{lock}\nflock -w {_SECONDS:.0f} 9\n"
            f"if [ -e {marker} ]; then cat >/dev/null; echo done; exit 0; fi\n"
            f"{self.script}\n: > {marker}\n"
        )


@dataclass(frozen=True, slots=True)
class Software:
    """Paths of installed software on the machine.

    `python` has this version of Buckeye. `environments` is the folder of installed environments, None if the
    run needs none. `vllm` is a Python with vLLM, None if vLLM does not work. `attention` describes the
    trainer's attention kernel.
    """

    python: str
    environments: str | None
    vllm: str | None
    attention: str


def setup_steps(
    environments: Sequence[NeededEnvironment] = (), extras: Iterable[str] = ()
) -> list[SetupStep]:
    """Return all steps, in order. `extras` are the extras that the run needs."""
    files = code_files()
    code = _key(*(part for name in sorted(files) for part in (name.encode(), files[name])))
    needed = sorted({*requirements({*EXTRAS, *extras}), *TOOLS})
    fixed = pinned_requirements(needed)
    torch = torch_version()
    packages = _key("\n".join([*needed, "", *fixed, torch]).encode(), scripts.PACKAGES.encode())
    venv = _key(code.encode(), packages.encode(), scripts.VENV.encode())
    vllm = _key(str(SUPPORTED_VLLM_VERSIONS).encode(), scripts.VLLM.encode())
    install = _filled(
        scripts.PACKAGES,
        KEY=packages,
        REQUIREMENTS=shlex.quote("\n".join(needed) + "\n"),
        PINS=shlex.quote("\n".join(fixed) + "\n"),
        TORCH=torch,
        WHEELS=_TORCH_INDEX,
    )
    found = [
        SetupStep("Python", _key(scripts.PYTHON.encode()), scripts.PYTHON),
        SetupStep("Buckeye", code, _filled(scripts.CODE, KEY=code), make_tar(files)),
        SetupStep("packages", packages, install),
        SetupStep(_VENV, venv, _filled(scripts.VENV, KEY=venv, PACKAGES=packages, CODE=code)),
        SetupStep(_VLLM, vllm, _filled(scripts.VLLM, KEY=vllm, VENV=venv, WHEELS=_TORCH_INDEX)),
    ]
    return [*found, _environments(environments, venv)] if environments else found


def _environments(needed: Sequence[NeededEnvironment], venv: str) -> SetupStep:
    """Return the step that installs environments. Each set of versions has a separate folder."""
    files: dict[str, bytes] = {}
    installs = []
    for number, one in enumerate(needed):
        lock = f"{number}.lock"
        if one.wheel is not None:
            files[one.what] = one.wheel
        if one.lock is not None:
            files[lock] = one.lock
        what = one.what if one.wheel is None else f"./{one.what}"
        how = scripts.INSTALL_IN_BUCKEYE_VENV if one.in_buckeye_venv else scripts.INSTALL
        installs.append(_filled(how, LOCK=lock, WHAT=shlex.quote(what)))
    parts = (part for name in sorted(files) for part in (name.encode(), files[name]))
    how_to = "".join((scripts.ENVIRONMENTS, *installs)).encode()
    key = _key(venv.encode(), how_to, *parts)
    script = _filled(scripts.ENVIRONMENTS, KEY=key, VENV=venv, INSTALLS="".join(installs))
    return SetupStep(_INSTALLED, key, script, make_tar(files))


async def bootstrap(
    link: SshConnection,
    *,
    tell: Callable[[str], None],
    environments: Sequence[NeededEnvironment] = (),
    extras: Iterable[str] = (),
) -> Software:
    """Run all steps that are not finished. Raises RemoteError with the last output of a step that fails."""
    needed = setup_steps(environments, extras)
    for number, step in enumerate(needed, 1):
        tell(f"{number}/{len(needed)} {step.title} ...")
        if await _carry_out(link, step, tell):
            tell(f"{number}/{len(needed)} {step.title}: was there")
    keys = {step.title: step.key for step in needed}
    ask = (
        f'{scripts.PRELUDE}printf "%s\\n" "$root"; cat "$root/venv-{keys[_VENV]}/attention"; '
        f'cat "$root/vllm-{keys[_VLLM]}/works" && echo works'
    )
    root, attention, *rest = (await link.run(["sh", "-c", ask])).stdout.decode().splitlines()
    place = f"{root}/environments-{keys[_INSTALLED]}" if _INSTALLED in keys else None
    return Software(
        python=f"{place}/venv/bin/python" if place else f"{root}/venv-{keys[_VENV]}/bin/python",
        environments=f"{place}/installed" if place else None,
        vllm=f"{root}/vllm-{keys[_VLLM]}/bin/python" if "works" in rest else None,
        attention=attention,
    )


async def _carry_out(link: SshConnection, step: SetupStep, tell: Callable[[str], None]) -> bool:
    """Run a step, and retry it after a lost connection. Return True if it was finished before."""
    for attempt in range(_CUTS + 1):
        try:
            await link.connect(timeout=_PATIENCE)
            done = await link.run(["sh", "-c", step.text()], data=step.data, seconds=_SECONDS)
        except LostConnectionError:
            if attempt == _CUTS:
                raise
            await asyncio.sleep(0)
            continue
        if done.code != 0:
            raise RemoteError(
                f"set-up step {step.title!r} failed on {link.target}:\n{done.text()}", code="BK-REMOTE-HOST"
            )
        for line in done.stderr.decode(errors="replace").splitlines():
            if line.startswith(_SAID):
                tell(f"warning: {line.removeprefix(_SAID)}")
        return done.stdout.strip() == b"done"
    raise AssertionError


def _filled(script: str, **words: str) -> str:
    """Return a script with its placeholders filled in. Raises KeyError for a missing value."""
    return re.sub(r"@([A-Z]+)@", lambda found: words[found[1]], script)


def _key(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
