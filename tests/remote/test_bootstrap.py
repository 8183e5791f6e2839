"""The steps that prepare a remote machine."""

import io
import subprocess
import tarfile
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buckeye.base.distribution import requirements
from buckeye.remote.bootstrap import EXTRAS, SetupStep, setup_steps
from buckeye.remote.software import pinned_requirements
from tests.places import ROOT


def do(step, home):
    return subprocess.run(
        ["sh", "-c", step.text()],
        input=step.data,
        env={"PATH": "/usr/bin:/bin", "BUCKEYE_HOME": str(home)},
        capture_output=True,
        check=False,
    )


def test_a_step_is_done_once_for_the_same_inputs(tmp_path):
    script = 'cat >> "$root/out"\n'
    assert do(SetupStep("A step", "k1", script, b"x"), tmp_path).stdout == b""
    assert do(SetupStep("A step", "k1", script, b"x"), tmp_path).stdout == b"done\n"
    assert do(SetupStep("A step", "k2", script, b"y"), tmp_path).stdout == b""
    assert (tmp_path / "software/out").read_text() == "xy"


def test_a_step_that_fails_is_done_again(tmp_path):
    step = SetupStep("A step", "k", '[ -e "$root/there" ] || { touch "$root/there"; echo why >&2; exit 5; }')
    first = do(step, tmp_path)
    assert (first.returncode, first.stderr) == (5, b"why\n")
    assert do(step, tmp_path).returncode == 0
    assert do(step, tmp_path).stdout == b"done\n"


def test_the_steps_are_shell_and_stay_the_same_from_call_to_call():
    first, second = setup_steps(), setup_steps()
    assert [(step.title, step.key) for step in first] == [(step.title, step.key) for step in second]
    assert len({step.title for step in first}) == len(first) == 5
    for step in first:
        done = subprocess.run(["sh", "-n"], input=step.text().encode(), capture_output=True, check=False)
        assert done.returncode == 0, (step.title, done.stderr)


def test_the_archive_has_this_version_of_the_package_and_no_caches():
    (code,) = [step for step in setup_steps() if step.data]
    with tarfile.open(fileobj=io.BytesIO(code.data)) as archive:
        names = archive.getnames()
        text = archive.extractfile("buckeye/remote/pod/agent.py").read()
    assert text == (ROOT / "src/buckeye/remote/pod/agent.py").read_bytes()
    assert "buckeye_rl.dist-info/entry_points.txt" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("/")]


def test_everything_the_package_declares_is_installed_and_nothing_of_itself():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = requirements(EXTRAS)
    names = {canonicalize_name(Requirement(line).name) for line in needed}
    for line in (*project["dependencies"], *extras["model"], *extras["mcp"], *extras["remote"]):
        assert line.startswith("buckeye-rl[") or canonicalize_name(Requirement(line).name) in names
    assert not [line for line in needed if line.startswith("buckeye")]


def test_another_machine_gets_what_only_its_platform_needs(tmp_path, monkeypatch):
    """Buckeye's wheel is installed on a Mac, and the pod runs Linux."""
    info = tmp_path / "buckeye_rl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Name: buckeye-rl\nVersion: 0.1.0\nProvides-Extra: train\nProvides-Extra: mcp\nRequires-Dist: a>=1\n"
        "Requires-Dist: buckeye-rl[mcp]; extra == 'train'\n"
        "Requires-Dist: b>=2; (sys_platform == 'elsewhere') and extra == 'mcp'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements(["train"]) == ["a>=1", 'b>=2; sys_platform == "elsewhere"']


def test_versions_are_those_of_here_but_for_builds_of_one_kind_of_machine():
    found = dict(line.split("==") for line in pinned_requirements(["httpx>=0.28", "torch>=2.8"]))
    import httpx

    assert found["httpx"] == httpx.__version__
    assert "h11" in found
    assert "torch" not in found
    assert not [name for name in found if name.startswith("nvidia")]
