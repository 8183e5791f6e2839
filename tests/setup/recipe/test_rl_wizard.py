"""`buckeye rl` at a terminal: its questions, the files it offers to create, and the state after Ctrl-C."""

import json
import os
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from tests.places import ROOT
from tests.setup.recipe.rl_project import CONFIG, LOCK, fill, task

SERVER = ROOT / "tests/setup/init/tool_server.py"
DIRECTION = {"type": "object", "properties": {"direction": {"enum": ["left"]}}, "required": ["direction"]}
TOOLS = [
    {"name": "go", "description": "Go somewhere.", "inputSchema": DIRECTION},
    {"name": "evaluate", "description": "", "inputSchema": {"type": "object", "properties": {}}},
]
pytestmark = pytest.mark.e2e
LIMIT = 120
CTRL_C = "\x03"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    fill(folder)
    return folder


def leave_out(project, what):
    """Remove the files that the question is about from the folder."""
    if what in ("configs", "all"):
        shutil.rmtree(project / "configs")
    if what in ("tasks", "all"):
        (project / "tasks.json").unlink()
    if what == "all":
        shutil.rmtree(project / "tiny")
    if what == "servers":
        (project / "buckeye.lock.yaml").write_text(LOCK)
        bare = task(0)
        del bare["mcp_config"]
        (project / "tasks.json").write_text(json.dumps([bare]))


def everything(folder):
    """Return all paths below a folder, including folders and temporary or hidden files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def wizard(project, tmp_path):
    """Return a function that starts the command at a terminal of 100 columns; all are ended with the test."""
    children = []

    def start(*words, **variables):
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("BUCKEYE_", "PRIME_"))
        }
        child = pexpect.spawn(
            sys.executable,
            ["-m", "buckeye", "rl", *words],
            cwd=str(project),
            env=kept
            | {
                "HOME": str(tmp_path / "home"),
                "XDG_STATE_HOME": str(tmp_path / "state"),
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                **variables,
            },
            encoding="utf-8",
            timeout=LIMIT,
            dimensions=(50, 100),
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def end(child):
    """Wait for the command to exit; return (exit code, last output)."""
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus, child.before


def to_the_model(child):
    """Choose this machine, if there is a choice."""
    if child.expect([r"Where\?", r"Which model\?"]) == 0:
        child.expect(r"\[1\]: ")
        child.sendline("1")
        child.expect(r"Which model\?")
    child.expect(r"\[1\]: ")


def test_wizard_prompts_for_the_model_and_confirms_the_plan(wizard, project):
    before = everything(project)
    child = wizard(NO_COLOR="1")
    to_the_model(child)
    assert "tiny  (local)" in child.before
    child.sendline("77")
    child.expect("77")
    child.sendline("tiny")
    child.expect(r"batch +32 rollouts: 4 tasks with 8 rollouts each")
    child.expect(r"Start\? \[Y/n\]: ")
    child.sendline("n")
    code, said = end(child)
    assert (code, "Nothing was started" in said) == (0, True)
    assert "\x1b[" not in said
    assert everything(project) == before


def test_ctrl_c_at_the_last_question_leaves_nothing(wizard, project):
    before = everything(project)
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"Start\? ")
    child.send(CTRL_C)
    code, said = end(child)
    assert (code, "error: interrupted" in said, "Traceback" in said) == (130, True, False)
    assert everything(project) == before


@pytest.mark.slow
def test_wizard_prompts_for_one_of_several_parts(wizard, project):
    (project / "configs" / "other.yaml").write_text(CONFIG)
    (project / "more_tasks.json").write_text(json.dumps([task(0)]))
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"Which environment\?.*1  configs/my-env.yaml.*2  configs/other.yaml.*: ")
    child.sendline("2")
    child.expect(r"Which tasks\?.*1  tasks.json.*2  more_tasks.json.*: ")
    child.sendline("more_tasks.json")
    child.expect(r"configs/other.yaml: go, done")
    child.expect(r"1 to train on, none held out \(more_tasks.json\)")
    child.expect(r"Start\? ")
    child.sendline("no")
    assert end(child)[0] == 0


@pytest.mark.slow
def test_wizard_creates_all_parts_in_an_empty_folder(wizard, project, tmp_path):
    leave_out(project, "all")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    child = wizard()
    child.expect(r"Which environment\? An image .* or a command line: ")
    child.sendline(f"{sys.executable} {SERVER} {tools}")
    child.expect(r"--- configs/tool_server.yaml ---.*Write configs/tool_server.yaml\? \[Y/n\]: ")
    assert everything(project) == []
    child.sendline("perhaps")
    child.expect("Enter y or n")
    child.sendline("")
    child.expect("go +worked")
    child.expect(r"No tasks found.*\(empty: create a file\): ")
    child.sendline("")
    child.expect("the prompt of the first task: ")
    child.sendline("Go home.")
    child.expect(r"--- tasks.json ---.*Write tasks.json\? \[Y/n\]: ")
    child.sendline("")
    assert end(child)[0] == 0
    files = ["configs/tool_server-files", "configs/tool_server-files/tools.json", "configs/tool_server.yaml"]
    assert everything(project) == ["configs", *files, "tasks.json"]
    (begun,) = json.loads((project / "tasks.json").read_text())
    server = {"command": sys.executable, "args": [str(SERVER), "{workdir}/tools.json"]}
    assert list(begun["mcp_config"].values()) == [server]  # the typed server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "answers", "question"),
    [
        ("configs", (), "a command line: "),
        ("configs", (f"{sys.executable} {SERVER} tools.json",), r"Write configs/tool_server.yaml\? "),
        ("tasks", (), r"create a file\): "),
        ("tasks", ("",), "the prompt of the first task: "),
        ("tasks", ("", "Go home."), r"Write tasks.json\? "),
        ("servers", (), "Write the dataset "),
        ("", (), r"Where\?.*\[1\]: "),
        ("", ("local",), r"Which model\?.*\[1\]: "),
        ("", ("local", "another"), "Model: "),
        ("", ("prime",), r"Which GPUs\? \[2xA100\]: "),
        ("", ("ssh",), r"Which host\? USER@HOST\[:PORT\]: "),
        ("", ("ssh", "me@there"), r"\(empty: none\): "),
    ],
)
@pytest.mark.parametrize("key", [CTRL_C, "\x04"])
def test_ctrl_c_and_ctrl_d_at_any_question_leave_the_folder_as_it_was(
    wizard, project, missing, answers, question, key
):
    (project / "tools.json").write_text(json.dumps(TOOLS))
    leave_out(project, missing)
    before = everything(project)
    child = wizard()
    for answer in answers:
        child.expect(r"\[1\]: |\[:PORT\]: |command line: |a file\): |first task: ")
        child.sendline(answer)
    child.expect(question)
    child.send(key)
    code, said = end(child)
    assert (code, "Traceback" in said) == (130, False)
    assert everything(project) == before
