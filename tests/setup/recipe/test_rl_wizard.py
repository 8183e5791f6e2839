"""`buckeye rl` at a terminal: what it asks, what it offers to make, and what Ctrl-C leaves."""

import json
import os
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from tests.places import ROOT
from tests.setup.recipe.rl_project import CONFIG, LOCK, files, fill, task, write_model

SERVER = ROOT / "tests/setup/init/tool_server.py"
DIRECTION = {"type": "object", "properties": {"direction": {"enum": ["left"]}}, "required": ["direction"]}
TOOLS = [
    {"name": "go", "description": "Go somewhere.", "inputSchema": DIRECTION},
    {"name": "evaluate", "description": "", "inputSchema": {"type": "object", "properties": {}}},
]
LIMIT = 120
CTRL_C = "\x03"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    fill(folder)
    return folder


@pytest.fixture
def wizard(project, tmp_path):
    """Start the command at a terminal of 100 columns; all of them are ended."""
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
    """Wait for it: (exit code, what it said last)."""
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus, child.before


def to_the_model(child):
    """This machine, if there is a choice."""
    if child.expect([r"Where\?", r"Which model\?"]) == 0:
        child.expect(r"\[1\]: ")
        child.sendline("1")
        child.expect(r"Which model\?")
    child.expect(r"\[1\]: ")


def test_it_asks_for_the_model_shows_the_plan_and_starts_only_with_consent(wizard, project):
    before = files(project)
    child = wizard(NO_COLOR="1")
    to_the_model(child)
    assert "tiny  (here)" in child.before
    child.sendline("77")
    child.expect("There is no 77")
    child.sendline("tiny")
    child.expect(r"batch +32 rollouts: 4 tasks, each played 8 times")
    child.expect(r"Start\? \[Y/n\]: ")
    child.sendline("n")
    code, said = end(child)
    assert (code, "Nothing was started" in said) == (0, True)
    assert "\x1b[" not in said
    assert files(project) == before


def test_ctrl_c_at_the_last_question_leaves_nothing(wizard, project):
    before = files(project)
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"Start\? ")
    child.send(CTRL_C)
    code, said = end(child)
    assert (code, "error: interrupted" in said, "Traceback" in said) == (130, True, False)
    assert files(project) == before


@pytest.mark.slow
def test_several_of_a_kind_are_a_choice(wizard, project):
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
def test_another_model_is_typed(wizard):
    child = wizard("--provider", "local")
    to_the_model(child)
    child.sendline("another")
    child.expect("Model: ")
    child.sendline("./nowhere")
    code, said = end(child)
    assert (code, "--model ./nowhere: this is no folder with a model" in said) == (2, True)


@pytest.mark.slow
def test_a_missing_configuration_is_made_of_what_is_named(wizard, project):
    shutil.rmtree(project / "configs")
    (project / "tools.json").write_text(json.dumps(TOOLS))
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect("Which environment\\?.*a command line: ")
    child.sendline(f"{sys.executable} {SERVER} tools.json")
    child.expect("--- configs/tool_server.yaml ---")
    child.expect("action_mappings:")
    child.expect(r"Write configs/tool_server.yaml\? \[Y/n\]: ")
    assert not (project / "configs").exists()
    child.sendline("perhaps")
    child.expect("Write y or n")
    child.sendline("y")
    child.expect("go +worked")
    child.expect(r"environment +tool_server")
    child.expect(r"Start\? ")
    child.sendline("n")
    assert end(child)[0] == 0
    assert (project / "configs" / "tool_server.yaml").exists()


@pytest.mark.slow
def test_whoever_does_not_want_the_file_keeps_the_folder_as_it_is(wizard, project):
    shutil.rmtree(project / "configs")
    (project / "tools.json").write_text(json.dumps(TOOLS))
    program = project / "bin" / "my-tools"  # one word, as tutorial and README have them
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {SERVER} {project}/tools.json\n")
    program.chmod(0o755)
    before = files(project)
    child = wizard("--model", "tiny", PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    child.expect("a command line: ")
    child.sendline("my-tools")
    child.expect(r"Write configs/my-tools.yaml\? ")
    child.sendline("n")
    code, said = end(child)
    assert (code, "was not written" in said) == (2, True)
    assert files(project) == before

    child = wizard("--model", "tiny")
    child.expect("a command line: ")
    child.sendline("")
    code, said = end(child)
    assert (code, "buckeye rl init" in said) == (2, True)


@pytest.mark.slow
def test_missing_tasks_can_be_named_or_begun(wizard, project):
    (project / "tasks.json").rename(project / "mine.json")
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"There are no tasks here.*\): ")
    child.sendline("mine.json")
    child.expect(r"6 to train on, none held out \(mine.json\)")
    child.expect(r"Start\? ")
    child.sendline("n")
    assert end(child)[0] == 0

    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"\(empty: begin a file\): ")
    child.sendline("")
    child.expect("What should the model do")
    child.sendline("Go home.")
    child.expect(r"Write tasks.json\? ")
    child.sendline("y")
    code, said = end(child)
    assert (code, "tasks.json has one task" in said) == (0, True)
    (begun,) = json.loads((project / "tasks.json").read_text())
    assert begun["prompt"] == "Go home."


@pytest.mark.slow
def test_tasks_without_servers_are_made_a_dataset_with_consent(wizard, project):
    (project / "buckeye.lock.yaml").write_text(LOCK)
    bare = task(0)
    del bare["mcp_config"]
    (project / "tasks.json").write_text(json.dumps([bare]))
    child = wizard("--model", "tiny", "--provider", "local")
    child.expect(r"Make the dataset my-env-tasks/ of them, on my-env:latest\? ")
    child.sendline("n")
    code, said = end(child)
    assert (code, "buckeye hf tasks.json --name my-env-tasks --no-push" in said) == (2, True)
    assert not (project / "my-env-tasks").exists()

    child = wizard("--model", "tiny", "--provider", "local")
    child.expect("Make the dataset ")
    child.sendline("y")
    child.expect(r"1 to train on, none held out \(my-env-tasks\)")
    child.expect(r"Start\? ")
    child.sendline("n")
    assert end(child)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "answers", "question"),
    [
        ("config", (), "a command line: "),
        ("config", (f"{sys.executable} {SERVER} tools.json",), r"Write configs/tool_server.yaml\? "),
        ("tasks", (), r"begin a file\): "),
        ("tasks", ("",), "the prompt of the first task: "),
        ("tasks", ("", "Go home."), r"Write tasks.json\? "),
        ("server", (), "Make the dataset "),
        ("", (), r"\[1\]: "),
        ("", ("another",), "Model: "),
    ],
)
@pytest.mark.parametrize("key", [CTRL_C, "\x04"])
def test_ctrl_c_and_ctrl_d_at_any_question_leave_the_folder_as_it_was(
    wizard, project, missing, answers, question, key
):
    (project / "tools.json").write_text(json.dumps(TOOLS))
    if missing == "config":
        shutil.rmtree(project / "configs")
    if missing == "tasks":
        (project / "tasks.json").unlink()
    if missing == "server":
        (project / "buckeye.lock.yaml").write_text(LOCK)
        bare = task(0)
        del bare["mcp_config"]
        (project / "tasks.json").write_text(json.dumps([bare]))
    before = files(project)
    child = wizard("--provider", "local")
    for answer in answers:
        child.expect(r"\[1\]: |: $")
        child.sendline(answer)
    child.expect(question)
    child.send(key)
    code, said = end(child)
    assert (code, "Traceback" in said) == (130, False)
    assert files(project) == before


@pytest.mark.slow
def test_a_terminal_of_forty_columns_shows_all_of_the_plan(wizard, project):
    write_model(project / "models" / "with-a-name-that-takes-a-whole-line")
    child = wizard("--yes", "--dry-run", "--quiet", "--model", "tiny")
    assert end(child)[0] == 0
    words = ("--dry-run", "--provider", "local", "--model", "models/with-a-name-that-takes-a-whole-line")
    child = wizard(*words, COLUMNS="40", NO_COLOR="1")
    child.expect("would be:")
    plan = child.before.replace("\r", "").split("\n\n")[0]
    assert "needs at least 4 tasks" in " ".join(plan.split())
    assert max(map(len, plan.splitlines())) <= 60  # a name is not broken
