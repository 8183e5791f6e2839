"""`buckeye rl init` does not change the user's files.

It copies the files that a command line names, blocks writes to all others, and leaves nothing behind.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.command import run_here
from tests.places import ROOT
from tests.setup.init.test_init import EVALUATE, SERVER, STARTS, calls, endings, tool

from buckeye.mcp.config import load_gym_config
from buckeye.mcp.sandbox.confine_command import find_writable_problem
from buckeye.setup.init import trial_server
from buckeye.setup.init.environment_source import find_source
from buckeye.setup.init.named_paths import copy_without_keys, named_paths

NOTES = ROOT / "tests" / "mcp" / "workdir" / "notes_server.py"
needs_walls = pytest.mark.skipif(bool(find_writable_problem()), reason="no namespaces here")
GIT_CONFIG = """[core]
\tbare = false
\tworktree = /elsewhere
[remote "origin"]
\turl = https://me:secret@example.com/x.git
[credential]
\thelper = store
[user]
\tname = me
"""


@pytest.fixture
def place(tmp_path):
    """A home, a user folder with a repository in it, and an empty working folder."""
    for name in ("home/.cache", "work", "user/project/.git/hooks", "user/project/sub"):
        (tmp_path / name).mkdir(parents=True)
    project = tmp_path / "user" / "project"
    (project / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (project / ".git" / "config").write_text(GIT_CONFIG)
    (project / ".git" / "hooks" / "post-commit").write_text("#!/bin/sh\nscp x y:\n")
    (project / "a.txt").write_text("hello")
    (project / ".env").write_text("TOKEN=secret")
    (project / "sub" / "inside").symlink_to("../a.txt")
    (project / "sub" / "outside").symlink_to(tmp_path / "home")
    (tmp_path / "home" / ".netrc").write_text("secret")
    return tmp_path


def seen(*folders):
    """Return mode, time and content hash of every path in the folders."""
    found = {}
    for folder in folders:
        for path in [folder, *sorted(folder.rglob("*"))]:
            about = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[str(path)] = (about.st_mode, about.st_mtime_ns, hashlib.sha256(content).hexdigest())
    return found


def started(place, tools, name="tool_server.py"):
    """Write a program that serves these tools."""
    (place / "tools.json").write_text(json.dumps(tools))
    program = place / name
    program.write_text(STARTS.format(server=str(SERVER), tools=str(place / "tools.json")))
    return program


def run(place, *words):
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(place / "home"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }
    return run_here("rl", "init", *words, cwd=place / "work", env=env)


def run_alone(place, *words):
    """Run the command in a separate process and wait for it."""
    env = {"PATH": os.environ["PATH"], "HOME": str(place / "home"), "XDG_CACHE_HOME": str(place / "cache")}
    argv = [sys.executable, "-m", "buckeye", "rl", "init", *map(str, words)]
    return subprocess.run(argv, cwd=place / "work", env=env, capture_output=True, text=True, check=False)


@needs_walls
@pytest.mark.e2e
def test_tools_act_on_a_copy_of_the_users_files(place):
    project, home = place / "user" / "project", place / "home"
    paths = [project / "a.txt", project / "new", home / ".netrc", home / "planted", place / "outside"]
    paths.append(Path("/tmp") / f"planted-{place.parent.name}-{place.name}")
    tools = [tool("write", " ".join(map(str, [*paths, "~/planted", "here"]))), tool("look")]
    program = started(place, tools)
    before = seen(place / "user", home)
    done = run_alone(place, "--command", f"{sys.executable} {program} {project}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen(place / "user", home) == before
    assert not any(path.exists() for path in paths[-2:])
    assert not (place / "tools.log").exists()  # the server's log would be next to its program
    assert endings(done.stdout) == {"write": "worked", "look": "worked"}
    copy = place / "work" / "configs" / "tool_server-files" / "project"
    assert (copy / "a.txt").read_text() == "hello"
    assert not (copy / "here").exists()  # files that tools made were removed with the session
    config = load_gym_config(place / "work" / "configs" / "tool_server.yaml")
    assert config.files == str(copy.parent)
    assert config.job.metadata["server"]["args"] == [str(program), "{workdir}/project"]
    left = [path for path in (place / "cache").rglob("*") if not path.is_dir() and path.name != ".lock"]
    assert left == []
    (project / "a.txt").write_text("changed")
    again = run_alone(place, "--command", f"{sys.executable} {program} {project}", "--force")
    assert "tool_server-files exists and was not replaced" in again.stdout
    assert (copy / "a.txt").read_text() == "hello"


def test_copy_leaves_out_keys_git_hooks_and_external_links(place, tmp_path, wording):
    project, copy = place / "user" / "project", tmp_path / "copy"
    done = copy_without_keys(project, copy)
    found = sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))
    assert found == [".git", ".git/HEAD", "a.txt", "sub", "sub/inside"]
    assert (copy / "sub" / "inside").read_text() == "hello"
    assert str(done) == wording


def test_copy_stops_at_the_limit_and_reports_it(place, tmp_path, monkeypatch, wording):
    folder = place / "user" / "large"
    (folder / "deep").mkdir(parents=True)
    for name in ("a", "b", "deep/c"):
        (folder / name).write_bytes(bytes(400))
    monkeypatch.setattr("buckeye.setup.init.named_paths._MAX_BYTES", 1000)
    done = copy_without_keys(folder, tmp_path / "copy")
    assert (done.files, done.bytes, done.above_limit) == (2, 800, 1)
    assert str(done) == wording


@pytest.mark.parametrize(
    "command",
    [
        "uvx mcp-server-git --repository {p}/repo",
        "npx -y @org/server-files {p}/repo {p}/x.db",
        "{p}/bin/serve --db={p}/x.db",
        "python {p}/serve.py --db sqlite:///{p}/x.db",
        "python -m serve {p}/repo/deep",
        "uv run --directory {p}/repo serve.py {p}/x.db",
        "env STORE={p}/x.db npx -y server",
        "serve {p}/repo {p}/repo/deep",
        "serve --db {p}/new.db --port 80 stdio",
        "docker run -v {p}/repo:/data image",
        "serve x.db",
        "serve repo",
        "serve --repository repo",
        "serve --repository other",
        "serve ./repo http://x/y -",
    ],
)
def test_named_paths_finds_files_in_a_command(tmp_path, monkeypatch, command, wording):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repo" / "deep").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("x.db", "serve.py", "bin/serve"):
        (tmp_path / name).touch()
    argv, paths = named_paths(command.format(p=tmp_path).split())
    assert " ".join(argv) == wording
    assert {name: str(path.relative_to(tmp_path)) for name, path in paths.items()} == wording


@pytest.mark.parametrize(
    ("command", "words", "env"),
    [
        ("env F=./a.db A='b c' server --x y=1", ["server", "--x", "y=1"], {"F": "./a.db", "A": "b c"}),
        ("FILE={user}/project node server.js", ["node", "server.js"], {"FILE": "{workdir}/project"}),
        ("API_KEY='$MY_KEY' server '$x'", ["server", "$$x"], {"API_KEY": "$MY_KEY"}),
        ("env -i A=b server", ["env", "-i", "A=b", "server"], {}),
        ("env", ["env"], {}),
        ("A=b", ["A=b"], {}),
    ],
)
def test_variables_before_a_program_are_its_environment(place, command, words, env):
    command = command.replace("{user}", str(place / "user"))
    written = find_source(None, command=command, headers={}).task_server
    assert [written.command, *written.args] == words
    assert written.env == env


def test_a_key_before_a_program_is_a_variable(place):
    (place / "work" / ".env").write_text("MY_KEY=hunter2\n")
    program = started(place, [tool("look")])
    program.write_text(f"import os\nassert os.environ['API_KEY'] == 'hunter2'\n{program.read_text()}")
    done = run(place, "--command", f"API_KEY='$MY_KEY' {sys.executable} {program}")
    assert done.returncode == 0, done.stdout + done.stderr
    written = (place / "work" / "configs" / "tool_server.yaml").read_text()
    assert '"env": {"API_KEY": "$MY_KEY"}' in written
    refused = run(place, "--command", f"API_KEY=hunter2 {sys.executable} {program}", "--force")
    assert refused.returncode == 2
    assert "BK-CLI-ARGUMENT" in refused.stderr


def test_destructive_and_open_world_tools_need_try_all(place, monkeypatch, wording):
    monkeypatch.setattr(trial_server, "find_writable_problem", lambda: "so that the server can write its log")
    send = tool("send") | {"annotations": {"openWorldHint": True}}
    wipe = tool("clear") | {"annotations": {"destructiveHint": True}}
    command = f"{sys.executable} {started(place, [send, wipe, tool('look'), EVALUATE])}"
    words = ("--command", command, "--include", "*")
    done = run(place, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "held back" in line] == wording
    assert "Passed" in done.stdout
    assert calls(place) == [("look", {})]
    untried = run(place, "--command", command, "--include", "send", "-o", "untried.yaml")
    assert (untried.returncode, "Passed" in untried.stdout) == (0, False)
    run(place, *words, "--try-all", "--force")
    assert {name for name, _ in calls(place)} == {"send", "clear", "look"}


def test_tools_are_chosen_by_name_and_pattern(place, wording):
    tools = [tool("get_one"), tool("get_two"), tool("reset_all"), tool("put_one")]
    command = f"{sys.executable} {started(place, tools)}"

    def actions(*words):
        done = run(place, "--command", command, "--dry-run", *words)
        assert done.returncode == 0, done.stderr
        return [name for name in yaml.safe_load(done.stdout)["action_mappings"] if name != "done"]

    assert actions() == ["get_one", "get_two", "put_one"]
    assert actions("--include", "get_*") == ["get_one", "get_two"]
    assert actions("--include", "reset_all") == ["reset_all"]  # a tool that is named explicitly is included
    assert actions("--include", "get_*", "--exclude", "get_two") == ["get_one"]
    for wrong in (("--include", "get_on"), ("--exclude", "get_on"), ("--exclude", "*")):
        done = run(place, "--command", command, *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == wording


def test_all_servers_of_tasks_are_started(place):
    first = started(place, [tool("look"), tool("both")], "first.py")
    (place / "more.json").write_text(json.dumps([tool("fetch"), tool("both")]))
    second = place / "second.py"
    second.write_text(STARTS.format(server=str(SERVER), tools=str(place / "more.json")))
    servers = {
        name: {"command": sys.executable, "args": [str(program)]}
        for name, program in (("a", first), ("b", second))
    }
    task = {"prompt": "p", "mcp_config": servers, "evaluate_tool": {"name": "judge", "arguments": {}}}
    (place / "work" / "t.json").write_text(json.dumps([task]))
    for words in (
        ("--dataset", "t.json"),
        ("--dataset", "t.json", "--command", f"{sys.executable} {second}"),
    ):
        done = run(place, *words, "--dry-run")
        assert done.returncode == 0, done.stderr
        actions = set(yaml.safe_load(done.stdout)["action_mappings"])
        assert actions == {"a/both", "b/both", "fetch", "look", "done"}


@pytest.mark.slow
def test_failed_start_leaves_no_files(place):
    program = place / "dies.py"
    program.write_text("import subprocess, sys\nsubprocess.Popen(['sleep', '1234567'])\nsys.exit(3)\n")
    done = run_alone(place, "--command", f"{sys.executable} {program} {place / 'user' / 'project'}")
    assert done.returncode == 1
    assert list((place / "work").iterdir()) == []
    assert [path for path in (place / "cache").rglob("*") if not path.is_dir() and path.name != ".lock"] == []
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 1234567" not in listed


@pytest.mark.parametrize(("graded", "reward"), [({"evaluate_tool": {"name": "evaluate"}}, 0.75), ({}, 0.5)])
def test_tasks_with_files_and_functions_are_tried_on_their_files(place, graded, reward):
    """The server's grade is 1 if its folder has one note; the function's is in the metadata of the task."""
    tasks = place / "user" / "tasks.json"
    (tasks.parent / "start").mkdir()
    (tasks.parent / "start" / "notes.txt").write_text("milk\n")
    (tasks.parent / "check.py").write_text("def grade(task, **given):\n    return task['metadata']['is']\n")
    server = {"command": sys.executable, "args": [str(NOTES)]}
    task = {"id": "a", "prompt": "Look.", "mcp_config": {"notes": server}, "files": "start"}
    task |= graded | {"grade": {"python": "check.py:grade"}, "metadata": {"is": 0.5}}
    tasks.write_text(json.dumps([task]))
    before = seen(place / "user")
    ran = run(place, "--dataset", str(tasks), "--include", "notes")
    assert ran.returncode == 0, ran.stderr
    assert f"reward of the first task: {reward:g}" in ran.stdout
    assert seen(place / "user") == before


def test_tools_without_read_only_hint_are_held_back_for_an_uncopied_url(place, wording):
    reads = tool("read") | {"annotations": {"readOnlyHint": True}}
    program = started(place, [tool("write_row"), reads])
    command = f"{sys.executable} {program} postgresql://me:secret@localhost/shop"
    printed = run(place, "--command", command).stdout
    assert endings(printed) == {"read": "worked", "write_row": "held back"}
    assert [line for line in printed.splitlines() if "held back" in line] == wording


def test_named_paths_ignores_devices_and_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", "/dev/urandom", str(tmp_path / "pipe")):
        assert named_paths(["server", f"--log={path}"])[1] == {}
