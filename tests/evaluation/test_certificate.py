"""`buckeye env check --certify` as a user runs it, on sound environments and on planted faults."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from buckeye.dataset.environment import NAME as DATASET
from buckeye.envs.base import Task
from buckeye.envs.settings import with_variables
from buckeye.errors import UsageError
from buckeye.evaluation.certify.certificate import (
    check_output,
    read_certificate,
    renewal_command,
    verify_certificate,
)
from buckeye.evaluation.certify.identity import changes, identify
from buckeye.workers.loading import open_environment
from tests.command import run_here
from tests.places import ROOT

FAULTY = str(ROOT / "tests" / "evaluation" / "faulty.py")
CERTIFICATES = sorted((ROOT / "environments" / "certificates").glob("*.json"))
_MACHINE = {"cost", "concurrency", "content-free policies"}
"""Checks that depend on the machine or its load."""


@pytest.fixture
def no_program_left():
    """End the programs that environments started in this process and left, as the end of a command does."""
    yield
    left = [child for child in psutil.Process().children() if child.name() == "sleep"]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)


def certify(folder, *words, env=FAULTY, sessions="100", budget="10"):
    words = ["--certify", "--sessions", sessions, "--budget", budget, *words]
    done = run_here("env", "check", env, *words, cwd=folder)
    return done, json.loads((folder / "certificate.json").read_text())


def verdicts(certificate, *wanted):
    return {check["name"]: check["verdict"] for check in certificate["checks"] if check["verdict"] in wanted}


@pytest.mark.parametrize("path", CERTIFICATES, ids=lambda path: path.stem)
def test_our_environments_are_those_of_their_certificates(path):
    done = run_here("env", "check", "--verify", str(path), cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", [".", "notes.md", "/dev/null"])
def test_another_file_is_no_certificate(tmp_path, name):
    (tmp_path / "notes.md").write_text("notes")
    done = run_here("env", "check", "--verify", name, cwd=tmp_path)
    assert (done.returncode, "BK-FILE-FORMAT" in done.stderr) == (2, True)


def test_another_file_is_not_overwritten(tmp_path):
    (tmp_path / "mine.md").write_text("notes")
    words = ["--certify", "--out", "mine.json"]
    done = run_here("env", "check", "dakota1890", *words, cwd=tmp_path)
    assert (done.returncode, "BK-FILE-EXISTS" in done.stderr) == (2, True)
    assert (tmp_path / "mine.md").read_text() == "notes"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("mine.md", "BK-CLI-ARGUMENT"),
        (".", "BK-CLI-ARGUMENT"),
        ("pipe", "BK-FILE-EXISTS"),
        ("folder", "BK-FILE-EXISTS"),
    ],
)
def test_a_certificate_needs_a_file_besides_its_page(tmp_path, monkeypatch, name, code):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    with pytest.raises(UsageError) as refused:
        check_output(Path(name))
    assert refused.value.code == code


def test_the_command_that_renews_a_certificate_has_its_settings():
    settings = {"sessions": 2_000_000, "sample": 5, "budget": 30.0, "max_content_free": 0.1, "seed": 1234567}
    command = renewal_command({"environment": {"id": "x", "args": {}}, "settings": settings}, Path("c.json"))
    words = shlex.split(command)
    assert renewal_command(
        {"environment": {"id": "x", "args": {}}, "settings": settings | {"variables": ["A", "B"]}}, Path("c")
    ).endswith(" --variables A,B")
    given = dict(zip(words[7::2], words[8::2], strict=True))
    assert {name.removeprefix("--").replace("-", "_"): float(v) for name, v in given.items()} == settings


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]"])
def test_a_file_that_is_no_certificate_is_refused(tmp_path, content):
    (tmp_path / "certificate.json").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_certificate(tmp_path / "certificate.json")
    assert refused.value.code == "BK-FILE-FORMAT"


def test_files_with_one_name_in_two_folders_are_all_verified(tmp_path, monkeypatch):
    rewards = [tmp_path / name / "reward.py" for name in ("first", "second")]
    for file in rewards:
        file.parent.mkdir()
        file.write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    environment = SimpleNamespace(name="rows", tasks={"train": [Task(id="a", messages=())]}.__getitem__)
    args = {"path": "rows", "reward": list(map(str, rewards))}
    before = identify(environment, DATASET, args)
    for number, file in enumerate(rewards, start=1):
        file.write_text("changed")
        assert len(changes(before, identify(environment, DATASET, args))) == number


def test_an_agent_with_a_variable_is_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORD_OF_AGENT", "x")
    code = "import os\nassert os.environ['WORD_OF_AGENT']\ndef run(task, endpoint): return 1.0\n"
    (tmp_path / "own_agent.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    args = {"callable": "own_agent.py:run", "tasks": "rows.jsonl"}
    opened = open_environment("agent", args, with_variables(["WORD_OF_AGENT"]))
    certificate = {
        "environment": {"id": "agent", "args": args},
        "settings": {"variables": ["WORD_OF_AGENT"]},
        **identify(opened, "agent", args),
    }
    assert list(certificate["package"]["files"]) == ["own_agent.py", "rows.jsonl"]
    assert verify_certificate(certificate) == []
    (tmp_path / "own_agent.py").write_text(code + "\n")
    assert verify_certificate(certificate) == ["file changed: own_agent.py"]


def test_files_of_a_package_below_a_link_keep_their_paths(tmp_path, monkeypatch):
    (tmp_path / "place" / "linked_package").mkdir(parents=True)
    (tmp_path / "place" / "linked_package" / "__init__.py").write_text("")
    (tmp_path / "link").symlink_to("place")
    monkeypatch.syspath_prepend(tmp_path / "link")
    environment = SimpleNamespace(name="a", tasks={"train": [Task(id="a", messages=())]}.__getitem__)
    files = identify(environment, "owner/linked-package", {})["package"]["files"]
    assert list(files) == ["linked_package/__init__.py"]


def test_a_certificate_names_faults_and_is_signed_and_verified(tmp_path):
    environment, key = tmp_path / "mine.py", tmp_path / "key"
    environment.write_text((ROOT / "tests" / "evaluation" / "faulty.py").read_text())
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    faults = json.dumps({"faults": ["file", "memory", "thread", "zombie", "task", "component"]})
    words = ["--args", faults, "--sign", str(key)]
    done, certificate = certify(tmp_path, *words, env="./mine.py", sessions="50", budget="5")
    assert done.returncode == 1
    assert certificate["verdict"] == "fail"
    assert verdicts(certificate, "fail") == dict.fromkeys(
        [
            "leak of memory",
            "leak of open files",
            "leak of threads",
            "leak of child processes",
            "leak of asyncio tasks",
        ],
        "fail",
    )
    assert verdicts(certificate, "warn")["components"] == "warn"
    measured = {check["name"]: check["measured"] for check in certificate["checks"]}
    assert measured["leak of open files"]["per_session"] == 1.0
    assert 90 <= measured["leak of memory"]["per_session"] <= 180  # with the stacks of the threads
    assert (tmp_path / "certificate.md").read_text().startswith("# Certificate of faulty: fail\n")

    check = ["env", "check", "--verify", "certificate.json"]
    assert run_here(*check, cwd=tmp_path).returncode == 0
    environment.write_text(environment.read_text().replace("* 37", "* 41"))
    changed = run_here(*check, "--json", cwd=tmp_path)
    assert changed.returncode == 1
    assert json.loads(changed.stdout)["changed"] == [
        "file changed: mine.py",
        "tasks changed: eval (60 before, 60 now)",
        "tasks changed: train (60 before, 60 now)",
    ]
    assert "buckeye env check ./mine.py --certify --out certificate.json" in changed.stderr
    path = tmp_path / "certificate.json"
    path.write_text(path.read_text().replace('"fail"', '"pass"'))
    forged = run_here(*check, cwd=tmp_path)
    assert forged.returncode == 1
    assert "BK-CERTIFICATE-SIGNATURE" in forged.stderr


FAULTS = {
    "counter": "isolation",
    "file": "leak of open files",
    "temporary file": "leak of temporary files",
    "memory": "leak of memory",
    "thread": "leak of threads",
    "child": "leak of child processes",
    "zombie": "leak of child processes",
    "task": "leak of asyncio tasks",
    "pattern": "grading time",
    "random": "determinism",
    "clock": "determinism",
    "component": "components",
    "range": "rewards from 0 to 1",
    "cancel": "timeouts",
    "blocks": "concurrency",
    "overlap": "train and held-out are disjoint",
    "answer shown": "no answer in the prompt",
}
SOUND = [
    "",
    "train only",
    "no probes",
    "clock shown",
    "turns",
    "slow",
    "busy",
    "child",
    "files",
    "cache",
    "background task",
    "no components",
    "penalty",
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "check"), FAULTS.items())
@pytest.mark.usefixtures("no_program_left")
def test_every_planted_fault_is_named(tmp_path, fault, check):
    _, certificate = certify(tmp_path, "--arg", f"faults={fault}", budget="20")
    assert check in verdicts(certificate, "fail", "warn")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_environment_passes(tmp_path, kind):
    _, certificate = certify(tmp_path, "--arg", f"kind={kind}", budget="20")
    assert verdicts(certificate, "fail", "warn") == {}
    assert certificate["verdict"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("path", CERTIFICATES, ids=lambda path: path.stem)
def test_a_new_certificate_has_the_verdicts_of_the_one_in_the_repository(tmp_path, path):
    recorded = json.loads(path.read_text())
    environment, out = recorded["environment"], tmp_path / "certificate.json"
    words = [environment["id"], "--args", json.dumps(environment["args"]), "--certify", "--out", str(out)]
    run_here("env", "check", *words, cwd=ROOT)
    renewed = json.loads(out.read_text())
    found = [
        {check["name"]: check["verdict"] for check in certificate["checks"] if check["name"] not in _MACHINE}
        for certificate in (recorded, renewed)
    ]
    assert found[1] == found[0]
