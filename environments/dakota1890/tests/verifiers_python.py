"""Virtual environments with `verifiers`."""

from pathlib import Path

from tests.remote.venvs import venv_with


def verifiers_python(version):
    """Return the Python of a virtual environment with `verifiers` of this version, "v0" or "v1"."""
    file = Path(__file__).with_name("verifiers_venvs") / f"requirements-{version}.txt"
    return venv_with(f"verifiers-{version}", *file.read_text().split()) / "python"
