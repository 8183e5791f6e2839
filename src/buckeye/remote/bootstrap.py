"""What another machine needs before it can train, in numbered steps.

Each one leaves a marker under the hash of what went into it, so that a second run, or one after a cut,
repeats nothing that is done.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from buckeye.errors import RemoteError
from buckeye.remote.connection import Link, LostConnectionError
from buckeye.remote.software import code_files, pins, requirements, torch_version
from buckeye.remote.upload import packed

_SECONDS = 2400.0
_PATIENCE = 600.0
_CUTS = 5
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_PRELUDE = """set -eu
umask 077
root="${BUCKEYE_HOME:-$HOME/.buckeye}/software"
mkdir -p "$root/done"
"""

_PYTHON = """
fits() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; }
found=
for name in ${BUCKEYE_PYTHON:-} python3.12 python3.13 python3.11 python3; do
  path=$(command -v "$name" 2>/dev/null) || continue
  if fits "$path" 2>/dev/null; then found=$path; break; fi
done
if [ -z "$found" ]; then
  export PATH="$HOME/.local/bin:$PATH"
  if ! command -v uv >/dev/null; then
    echo "no Python 3.11 to 3.13 with venv here; getting uv" >&2
    python3 -m pip install --user --quiet uv 2>/dev/null \\
      || curl -LsSf https://astral.sh/uv/install.sh | sh >&2 \\
      || { echo "uv could not be had. Install Python 3.12 with venv there." >&2; exit 1; }
  fi
  uv python install --quiet 3.12 >&2
  found=$(uv python find 3.12)
fi
ln -sfn "$found" "$root/python-found"
"""

_CODE = """
rm -rf "$root/code-KEY"
mkdir "$root/code-KEY"
tar -xf - -C "$root/code-KEY"
"""

_PACKAGES = """
place="$root/packages-KEY"
rm -rf "$place"
"$(readlink "$root/python-found")" -m venv "$place"
pip() { "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
printf %s REQUIREMENTS > "$place/requirements.txt"
printf %s PINS > "$place/pins.txt"
if ! command -v nvidia-smi >/dev/null; then
  [ -z TORCH ] || pip 'torch=='TORCH'+cpu' 2>/dev/null \\
    || pip 'torch=='TORCH'+cpu' --extra-index-url CPU_INDEX \\
    || echo "no CPU build of torch TORCH: another one is taken" >&2
fi
pip -r "$place/requirements.txt" -c "$place/pins.txt" || {
  echo "not all versions of the other machine can be had here: the newest ones are taken" >&2
  pip -r "$place/requirements.txt"
}
"""

_VENV = """
place="$root/venv-KEY"
rm -rf "$place"
"$root/packages-PACKAGES/bin/python" -m venv --without-pip "$place"
purelib() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages=$(purelib "$root/packages-PACKAGES")
printf 'import site; site.addsitedir("%s")\\n%s\\n' "$packages" "$root/code-CODE" \\
  > "$(purelib "$place")/buckeye-layers.pth"
"$place/bin/python" -c 'import buckeye.cli.main, torch'
"""

_VLLM = """
if command -v nvidia-smi >/dev/null; then
  "$root/venv-KEY/bin/python" -m buckeye vllm install >&2 \\
    || echo "vLLM could not be installed: runs use the built-in engine" >&2
fi
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it is called, the hash of what goes into it, a script, and what the script reads."""

    title: str
    key: str
    script: str
    data: bytes = b""

    def text(self) -> str:
        """The script as it is run: nothing if it was done, one at a time."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.title.lower())
        marker = f'"$root/done/{slug}-{self.key}"'
        lock = f'"$root/done/{slug}.lock"'
        return (
            f"{_PRELUDE}exec 9>{lock}\nflock -w {_SECONDS:.0f} 9\n"
            f"if [ -e {marker} ]; then cat >/dev/null; echo done; exit 0; fi\n"
            f"{self.script}\n: > {marker}\n"
        )


@dataclass(frozen=True, slots=True)
class Software:
    """Where things are there. `python` knows this version of Buckeye."""

    python: str


def steps() -> list[Step]:
    """All of them, in order; the last one but vLLM's makes the environment whose key is its own."""
    files = code_files()
    code = _key(*(part for name in sorted(files) for part in (name.encode(), files[name])))
    needed = requirements()
    fixed = pins(needed)
    torch = torch_version()
    packages = _key("\n".join([*needed, "", *fixed, torch]).encode(), _PACKAGES.encode())
    venv = _key(code.encode(), packages.encode(), _VENV.encode())
    install = (
        _PACKAGES.replace("KEY", packages)
        .replace("REQUIREMENTS", shlex.quote("\n".join(needed) + "\n"))
        .replace("PINS", shlex.quote("\n".join(fixed) + "\n"))
        .replace("CPU_INDEX", _CPU_INDEX)
        .replace("TORCH", shlex.quote(torch))
    )
    layers = _VENV.replace("KEY", venv).replace("PACKAGES", packages).replace("CODE", code)
    return [
        Step("Python", _key(_PYTHON.encode()), _PYTHON),
        Step("Buckeye", code, _CODE.replace("KEY", code), packed(files)),
        Step("packages", packages, install),
        Step("environment", venv, layers),
        Step("vLLM", venv, _VLLM.replace("KEY", venv)),
    ]


async def bootstrap(link: Link, *, tell: Callable[[str], None]) -> Software:
    """Carry out what is not done yet. Raises RemoteError with the last words of a step that fails."""
    needed = steps()
    for number, step in enumerate(needed, 1):
        tell(f"{number}/{len(needed)} {step.title} ...")
        done = await _carry_out(link, step)
        if done:
            tell(f"{number}/{len(needed)} {step.title}: was there")
    found = await link.run(["sh", "-c", f'{_PRELUDE}printf %s "$root"'])
    return Software(python=f"{found.stdout.decode()}/venv-{needed[3].key}/bin/python")


async def _carry_out(link: Link, step: Step) -> bool:
    """Whether it was done before. A step that was cut off is begun again."""
    for attempt in range(_CUTS + 1):
        try:
            await link.connect(patience=_PATIENCE)
            done = await link.run(["sh", "-c", step.text()], data=step.data, seconds=_SECONDS)
        except LostConnectionError:
            if attempt == _CUTS:
                raise
            await asyncio.sleep(0)
            continue
        if done.code != 0:
            raise RemoteError(f"Step {step.title!r} failed on {link.target}:\n{done.text()}")
        return done.stdout.strip() == b"done"
    raise AssertionError


def _key(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
