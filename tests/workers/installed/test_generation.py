"""Interface of a distribution, detected from its metadata and source."""

import sys
import zipfile
from importlib import metadata

import pytest
from tests.workers.installed.package_index import wheel

from buckeye.errors import BuckeyeError
from buckeye.workers.installed.interface import detect_interface

LOADER = "def load_environment(**args):\n    return None\n"
TASKSET = "import verifiers.v1 as vf\n\n\nclass Sums(vf.Taskset):\n    pass\n"
OURS = "[buckeye.environments]\nsums = sums.place:load_environment\n"


def found(tmp_path, source=LOADER, *, name="sums", extras=(), chosen=(), requires=(), entry_points=""):
    files = {"sums/__init__.py": source, "sums/place.py": ""}
    path = wheel(tmp_path, name, files=files, requires=requires, extras=extras, entry_points=entry_points)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    (distribution,) = metadata.distributions(path=[str(tmp_path / "site")])
    before = set(sys.modules)
    interface = detect_interface(distribution, chosen)
    assert set(sys.modules) == before  # nothing of it was imported
    return interface


@pytest.mark.parametrize(
    ("requires", "source", "generation", "release"),
    [
        (["verifiers>=0.1.5"], LOADER, "verifiers-v0", "verifiers==0.3.1"),
        (["verifiers==0.1.14"], LOADER, "verifiers-v0", "verifiers<0.4"),
        (["verifiers>=0.3"], TASKSET, "verifiers-v1", "verifiers>=0.4,<0.5"),
        (["verifiers>=0.4"], LOADER, "verifiers-v1", "verifiers>=0.4,<0.5"),
        ([], LOADER, "verifiers-v0", "verifiers==0.3.1"),
        ([], TASKSET, "verifiers-v1", "verifiers>=0.4,<0.5"),
    ],
)
def test_packages_of_verifiers(tmp_path, requires, source, generation, release):
    interface = found(tmp_path, source, requires=requires)
    assert (interface.generation, interface.module) == (generation, "sums")
    assert interface.constraints[0] == release
    assert "verifiers" in interface.requirements


EXTRAS = {
    "extras": ["buckeye", "v0", "v1"],
    "requires": [
        "buckeye-rl; extra == 'buckeye'",
        "verifiers<0.4; extra == 'v0'",
        "verifiers>=0.4; extra == 'v1'",
    ],
    "entry_points": OURS,
}


@pytest.mark.parametrize(
    ("chosen", "generation", "own"),
    [
        ((), "verifiers-v0", ("v0",)),
        (("v1",), "verifiers-v1", ("v1",)),
        (("buckeye",), "buckeye", ()),
    ],
)
def test_extras_select_the_interface_of_a_package(tmp_path, chosen, generation, own):
    interface = found(tmp_path, chosen=chosen, **EXTRAS)
    assert (interface.generation, interface.extras) == (generation, own)


def test_buckeye_entry_point_is_detected(tmp_path):
    interface = found(tmp_path, entry_points=OURS)
    assert (interface.generation, interface.module) == ("buckeye", "sums.place")
    assert interface.constraints == interface.requirements == ()


@pytest.mark.parametrize(
    "name",
    [
        "reasoning-gym",
        "textarena",
        "gymnasium",
        "skyrl-gym",
        "inspect-ai",
        "openenv",
        "bfcl-eval",
        "ors-sdk",
        "openreward",
        "hud",
    ],
)
def test_libraries_are_known_by_name(tmp_path, name):
    assert found(tmp_path, name=name).generation == name


def test_bounds_of_the_package_replace_default_bounds(tmp_path):
    interface = found(tmp_path, requires=["verifiers", "openai>=3", "mcp"])
    names = [c.rstrip("0123456789.<>=,") for c in interface.constraints]
    assert names == ["verifiers", "renderers", "mcp", "transformers"]


def test_a_package_without_an_environment_is_refused(tmp_path, refusal):
    with refusal(BuckeyeError):
        found(tmp_path, "x = 1\n")
