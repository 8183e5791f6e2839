"""`buckeye rl` at a terminal in an empty folder, and Ctrl-C at the questions about places and choices."""

import json
import sys

import pytest
from tests.setup.recipe import test_rl_wizard as at_a_terminal
from tests.setup.recipe.rl_project import CONFIG, LOCK, fill, task
from tests.setup.recipe.test_rl_wizard import CTRL_C, SERVER, TOOLS, end

pytestmark = pytest.mark.slow

wizard = at_a_terminal.wizard


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def everything(folder):
    """All paths below a folder, also of folders and of files with a temporary or a hidden name."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_an_empty_folder_is_asked_for_one_part_after_the_other(wizard, project, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    child = wizard()
    child.expect(r"Which environment\? An image .* or a command line: ")
    child.sendline(f"{sys.executable} {SERVER} {tools}")
    child.expect(r"--- configs/tool_server.yaml ---.*Write configs/tool_server.yaml\? \[Y/n\]: ")
    assert everything(project) == []
    child.sendline("")
    child.expect(r"There are no tasks here.*\(empty: begin a file\): ")
    child.sendline("")
    child.expect("the prompt of the first task: ")
    child.sendline("Go home.")
    child.expect(r"--- tasks.json ---.*Write tasks.json\? \[Y/n\]: ")
    child.sendline("")
    code, said = end(child)
    assert (code, "buckeye rl" in said) == (0, True)
    files = ["configs/tool_server-files", "configs/tool_server-files/tools.json", "configs/tool_server.yaml"]
    assert everything(project) == ["configs", *files, "tasks.json"]
    (begun,) = json.loads((project / "tasks.json").read_text())
    server = {"command": sys.executable, "args": [str(SERVER), "{workdir}/tools.json"]}
    assert list(begun["mcp_config"].values()) == [server]  # what was typed

    (project / "tasks.json").write_text(json.dumps([task(0)]))
    before = everything(project)
    child = wizard()
    child.expect(r"Where\?.*\[1\]: ")
    child.sendline("local")
    child.expect(r"Which model\?.*\[1\]: ")
    child.send(CTRL_C)
    assert end(child)[0] == 130
    assert everything(project) == before


@pytest.mark.parametrize(
    ("there", "answers", "question"),
    [
        ("nothing", (), "a command line: "),
        ("lock", (), r"Write one for the environment in this folder\? \[Y/n\]: "),
        ("configs", (), r"Which environment\?.*\[1\]: "),
        ("tasks", (), r"Which tasks\?.*\[1\]: "),
        ("all", (), r"Where\?.*\[1\]: "),
        ("all", ("prime",), r"Which GPUs\? \[2xA100\]: "),
        ("all", ("ssh",), r"Which host\? USER@HOST\[:PORT\]: "),
        ("all", ("ssh", "me@there"), r"\(empty: none\): "),
    ],
)
def test_ctrl_c_leaves_the_folder_as_it_was(wizard, project, there, answers, question):
    if there == "lock":
        (project / "buckeye.lock.yaml").write_text(LOCK)
    elif there != "nothing":
        fill(project)
    if there == "configs":
        (project / "configs" / "other.yaml").write_text(CONFIG)
    if there == "tasks":
        (project / "more_tasks.json").write_text(json.dumps([task(0)]))
    before = everything(project)
    child = wizard()
    for answer in answers:
        child.expect(r"\[1\]: |\[:PORT\]: ")
        child.sendline(answer)
    child.expect(question)
    child.send(CTRL_C)
    code, said = end(child)
    assert (code, "error: interrupted" in said, "Traceback" in said) == (130, True, False)
    assert everything(project) == before
