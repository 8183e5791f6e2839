"""Installation by the commands of README and tutorial, and from an index, into clean environments."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from tests.places import ROOT
from tests.workers.installed.package_index import serving

from buckeye.base.distribution import DISTRIBUTION

OURS = (".", "environments/dakota1890", "environments/text_2048", "environments/buckeye-vf-gym")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]


class Clean:
    """New virtual environment, and an empty folder next to a checkout named `buckeye`."""

    def __init__(self, root):
        self.python = root / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
        (root / "buckeye").symlink_to(ROOT)
        self.folder = root / "empty"
        self.folder.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BUCKEYE_", "PYTHON"))}
        self.env = {**kept, "HOME": str(root), "PATH": f"{self.python.parent}:/usr/bin:/bin"}

    def run(self, command, cwd=None):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=cwd or self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture
def clean(tmp_path):
    return Clean(tmp_path)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    wheels = tmp_path_factory.mktemp("wheels")
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *OURS]
    release = {**os.environ, "BUCKEYE_RELEASE": "1"}
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, env=release)
    with serving(wheels) as (url, _):
        yield url


def line(page, start):
    """Return the command of a page that begins with `start`."""
    (found,) = re.findall(rf"^{re.escape(start)}.*$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return found


@pytest.mark.parametrize(
    ("page", "start", "place"),
    [
        ("README.md", "pip install '.[", ROOT),
        ("docs/tutorials/first-run.md", "pip install '../buckeye[", None),
    ],
    ids=["README", "tutorial"],
)
def test_what_the_pages_say_installs_what_trains(clean, page, start, place):
    spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.install_torch(clean.python)  # the build for this machine, as docs/how-to/install.md describes
    clean.run(line(page, start), cwd=place)
    clean.run("pip check")
    clean.run("buckeye model tiny tiny")  # the model of the demonstration
    assert "Qwen3" in (clean.folder / "tiny" / "config.json").read_text()


@pytest.mark.parametrize("extra", ["", "[mcp]", "[hub]", "[remote]", "[wandb,zstd]"])
def test_an_extra_from_an_index(clean, index, extra):
    clean.run(f"pip install --quiet --extra-index-url {index} '{DISTRIBUTION}{extra}'")
    clean.run("pip check")
    for program in ("buckeye", "rl", "buckeye worker trainer", "buckeye serve", "buckeye sft"):
        assert "--help" in clean.run(f"{program} --help")
    clean.run("rl list && buckeye env new game --kind python")
    clean.run(f"pip install --quiet --extra-index-url {index} ./game")
    clean.run("buckeye env check game")


@pytest.mark.parametrize("extra", ["mcp", "remote"])
def test_an_extra_from_the_checkout_needs_no_index_that_has_ours(clean, extra):
    clean.run(f"pip install --quiet '.[{extra}]'", cwd=ROOT)
    clean.run("pip check")


def test_the_environments_of_the_project_from_an_index(clean, index):
    clean.run(f"pip install --quiet --extra-index-url {index} buckeye-vf-gym text-2048 dakota1890")
    clean.run("pip check")
    there = {entry.partition("==")[0] for entry in clean.run("pip list --format=freeze").splitlines()}
    assert there >= {DISTRIBUTION, "buckeye-vf-gym", "dakota1890", "text-2048"}
