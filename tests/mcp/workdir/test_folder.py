"""The folder of each rollout: its content, the servers' environment in it, and its removal."""

import asyncio
import errno
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cancelling import cancelled_at
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.environment.scripted import Scripted
from tests.mcp.gym import gym_config, mapping

from buckeye.errors import UsageError
from buckeye.mcp.client.control_group import create_control_group, kill_control_group
from buckeye.mcp.client.errors import StartError
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.config import load_gym_config
from buckeye.mcp.environment import McpEnvironment
from buckeye.mcp.sandbox.process_runtimes import CommandRuntime
from buckeye.mcp.sandbox.runtime import PrepareError, SandboxLimits, cache_folder
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.workdir import initial_files
from buckeye.mcp.workdir.folder import Workdir, open_workdir
from buckeye.mcp.workdir.initial_files import SizeLimit, prepare_files
from buckeye.mcp.workdir.server_environment import find_unreachable_files, resolve_local_paths
from buckeye.orchestrator.rollout_runner import run_rollout

NOTES = str(Path(__file__).with_name("notes_server.py"))
TOOLS = {"add": ["text"], "notes": [], "where": [], "environment": [], "fill": ["count"], "daemon": []}
TOOLS |= {"hide": [], "run": ["code"]}
DONE = "<tool>done()</tool>"


def task(*args, **fields):
    server = {"command": sys.executable, "args": [NOTES, *args]}
    given = {"id": "one", "prompt": "Note.", "mcp_config": {"notes": server}}
    return McpTask.model_validate(given | {"evaluate_tool": {"name": "evaluate"}} | fields)


def config(actions=None, **fields):
    return gym_config(actions or {name: mapping(name, *names) for name, names in TOOLS.items()}, **fields)


async def played(one, *calls, gym=None):
    """Return the outcome, and the results of the calls."""
    policy = Scripted(*(f"<tool>{call}</tool>" for call in calls), DONE)
    environment = McpEnvironment(gym or config(), {"train": [one]})
    outcome = await environment.rollout(environment.tasks("train")[0], policy)
    read = [m["content"] for m in policy.seen if m["role"] == "user"][1:]
    return outcome, [text.removeprefix("<result>\n").removesuffix("\n</result>") for text in read]


@pytest.fixture
def marked():
    """Task whose servers have a marker in their environment; none of them may be left at the end."""
    marker = str(uuid.uuid4())
    server = {"command": sys.executable, "args": [NOTES], "env": {"MARKER": marker}}
    yield task(mcp_config={"notes": server})
    assert_none_left(marker)


def play(one, *calls, gym=None):
    return asyncio.run(played(one, *calls, gym=gym))


def test_unreachable_path_in_arguments_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/app.db", "serve.py"):
        (tmp_path / name).touch()
    words = ("serve.py", "--db=data/app.db", "data/none.db", "data", str(tmp_path / "data/app.db"))

    def told(**fields):
        caplog.clear()
        tasks = [task(*words), task(*words).model_copy(update={"id": "two"})]
        McpEnvironment(config(**fields), {"train": tasks})
        return [record.getMessage() for record in caplog.records]

    (said,) = told()
    assert "data/app.db" in said
    assert told(files=str(tmp_path / "data")) == []


def left():
    """Return the rollout folders of this process that still exist, except prepared files."""
    own = (cache_folder().resolve() / "rollouts").glob(f"{os.getpid()}-*")
    return [path for folder in own for path in folder.iterdir() if (path / "work").exists()]


def test_server_starts_in_workdir_that_is_removed():
    outcome, (where, environment) = play(task(), "where()", "environment()")
    assert json.loads(where) == {"cwd": "{workdir}", "files": []}
    variables = json.loads(environment)
    names = ["HOME", "TMPDIR", *(f"XDG_{kind}" for kind in ("CACHE_HOME", "CONFIG_HOME", "RUNTIME_DIR"))]
    found = [variables[name].removeprefix("{workdir}/../") for name in names]
    assert found == ["home", "tmp", "home/.cache", "home/.config", "run"]
    assert (outcome.error, left()) == (None, [])


def test_concurrent_rollouts_have_separate_workdirs():
    async def several():
        return await asyncio.gather(
            *(played(task(), "add('mine')", "notes()") for _ in range(3)), played(task())
        )

    *noted, idle = asyncio.run(several())
    assert [(outcome.reward, said) for outcome, said in noted] == [(1.0, ["added", "mine"])] * 3
    assert (idle[0].reward, idle[0].components["notes"]) == (0.0, 0.0)


def test_workdir_placeholder_is_replaced_everywhere(tmp_path):
    server = {"command": sys.executable, "args": [NOTES, "{workdir}/deep.txt"], "env": {"AT": "{workdir}/x"}}
    calls = ["add('{workdir}/y')", "notes()", "environment()", "where()"]
    _, (_, notes, environment, where) = play(task(mcp_config={"notes": server}), *calls)
    assert notes == "{workdir}/y"
    assert json.loads(environment)["AT"] == "{workdir}/x"
    assert json.loads(where)["files"] == ["deep.txt"]


def test_server_with_cwd_and_relative_script_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(NOTES).parent)
    server = {"command": sys.executable, "args": [Path(NOTES).name], "cwd": str(tmp_path)}
    _, (where,) = play(task(mcp_config={"notes": server}), "where()")
    assert json.loads(where)["cwd"] == str(tmp_path)
    server = {"command": sys.executable, "args": ["-m", "notes_server"]}
    _, (where,) = play(task(mcp_config={"notes": server}), "where()")
    assert json.loads(where)["cwd"] == "{workdir}"


def test_relative_program_is_resolved_and_data_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bin/server", "data/shop"):
        Path(name).parent.mkdir()
        Path(name).touch()
    Path("bin/server").chmod(0o755)
    server = StdioServer(command="node", args=["bin/server", "./data", "data/shop", "x" * 300, "x" * 5000])
    assert resolve_local_paths(server, tmp_path / "data").args == [
        str(tmp_path / "bin/server"),
        *server.args[1:],
    ]
    assert find_unreachable_files(server) == ["data", "data/shop"]


def test_servers_of_task_share_workdir():
    first = {"command": sys.executable, "args": [NOTES]}
    servers = {"a": first, "b": first}
    actions = {"add": mapping("a/add", "text"), "notes": mapping("b/notes")}
    one = task(mcp_config=servers, evaluate_tool={"name": "b/evaluate"})
    outcome, said = play(one, "add('hello')", "notes()", gym=config(actions))
    assert (said, outcome.reward) == (["added", "hello"], 1.0)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "fixture"
    (made / "deep").mkdir(parents=True)
    (made / "notes.txt").write_text("first\n")
    (made / "deep" / "tool.sh").write_text("true\n")
    (made / "deep" / "tool.sh").chmod(0o555)
    (made / "link").symlink_to("deep/tool.sh")
    return made


def archive(folder, kind):
    path = folder.parent / f"fixture.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as made:
            made.write(folder / "notes.txt", "notes.txt")
    else:
        with tarfile.open(path, f"w:{kind.partition('.')[2]}") as made:
            made.add(folder / "notes.txt", "notes.txt")
    return path


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz", "sh", "file"])
def test_initial_files_are_copied_and_never_changed(folder, kind, tmp_path):
    if kind == "sh":
        files = tmp_path / "make.sh"
        files.write_text("echo first > notes.txt\n")
    else:
        files = {"folder": folder, "file": folder / "notes.txt"}.get(kind) or archive(folder, kind)
    before = files.read_bytes() if files.is_file() else (folder / "notes.txt").read_bytes()
    for _ in range(2):
        outcome, (notes, *_) = play(task(files=str(files)), "notes()", "add('second')")
        assert (notes, outcome.components["notes"]) == ("first", 2.0)
    assert before == (files.read_bytes() if files.is_file() else (folder / "notes.txt").read_bytes())
    assert outcome.components["workdir_bytes"] == (11.0 if kind == "folder" else 6.0)
    assert outcome.components["workdir_seconds"] > 0


def test_folder_is_copied_with_modes_and_links(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    prepare_files(str(folder), copy, SizeLimit(1000))
    assert os.readlink(copy / "link") == "deep/tool.sh"
    assert (copy / "deep" / "tool.sh").stat().st_mode & 0o777 == 0o555
    assert (copy / "notes.txt").stat().st_mtime_ns == (folder / "notes.txt").stat().st_mtime_ns
    assert (copy / "notes.txt").stat().st_ino != (folder / "notes.txt").stat().st_ino


def test_files_of_configuration_apply_to_tasks_without_files(folder, tmp_path):
    (tmp_path / "other.txt").write_text("")
    (tmp_path / "gym.yaml").write_text(
        "files: fixture\nparser: {format: tools}\naction_mappings: {where: {_tool: where}}\n"
    )
    read_config = load_gym_config(tmp_path / "gym.yaml")
    assert read_config.files == str(folder)
    tasks = [task().model_dump(), task(files="other.txt").model_dump() | {"id": "two"}]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    read = read_tasks(tmp_path / "tasks.json")
    assert [one.files for one in read] == [None, str(tmp_path / "other.txt")]
    ready = config(files=read_config.files)
    found = [json.loads(play(one, "where()", gym=ready)[1][0])["files"] for one in read]
    assert found == [["deep", "link", "notes.txt"], ["other.txt"]]


def zipped(folder, name="inner", *, mode=0o100644, size=3):
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(folder.parent / "spoilt.zip", "w") as made:
        made.writestr(info, b"0" * size)
    return folder.parent / "spoilt.zip"


def damaged(folder, changes):
    """Return an archive with other bytes at some places after a signature."""
    path = zipped(folder)
    content = bytearray(path.read_bytes())
    for signature, place, value in changes:
        content[content.index(signature) + place] = value
    path.write_bytes(content)
    return path


def tarred(folder, name="inner", *, size=3):
    info = tarfile.TarInfo(name)
    info.size = size
    with tarfile.open(folder.parent / "spoilt.tgz", "w:gz") as made:
        made.addfile(info, io.BytesIO(b"0" * size))
    return folder.parent / "spoilt.tgz"


def script(folder):
    (folder.parent / "spoilt.sh").write_text("echo no luck >&2; exit 3\n")
    return folder.parent / "spoilt.sh"


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


SPOILT_FILES = {
    "link out": (lambda folder: (folder / "out").symlink_to("/etc/passwd"), "to /etc/passwd"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "neither a file"),
    "only a pipe": (pipe, "neither a file"),
    "large": (lambda folder: (folder / "large").write_bytes(b"x" * 5000) and None, "4,096 bytes"),
    "zip out": (lambda folder: zipped(folder, "../out"), "outside of the archive"),
    "zip link": (lambda folder: zipped(folder, mode=0o120777), "is a link"),
    "damaged zip": (lambda folder: damaged(folder, [(b"PK\3\4", 35, 255)]), "cannot read"),
    "encrypted zip": (
        lambda folder: damaged(folder, [(b"PK\3\4", 6, 1), (b"PK\1\2", 8, 1)]),
        "cannot read",
    ),
    "unknown zip": (
        lambda folder: damaged(folder, [(b"PK\3\4", 8, 99), (b"PK\1\2", 10, 99)]),
        "cannot read",
    ),
    "bomb": (lambda folder: zipped(folder, size=10**6), "4,096 bytes"),
    "tar out": (lambda folder: tarred(folder, "../out"), "outside"),
    "tar bomb": (lambda folder: tarred(folder, size=10**6), "4,096 bytes"),
    "script": (script, "no luck"),
}


@pytest.mark.parametrize("way", SPOILT_FILES)
def test_unusable_files_are_environment_error(folder, way, tmp_path):
    spoil, said = SPOILT_FILES[way]
    files = spoil(folder) or folder
    outcome, _ = play(task(files=str(files)), gym=config(defaults={"workdir_bytes": 4096}))
    assert (outcome.reward, outcome.stop_reason) == (None, "start_failed")
    assert outcome.boundary == (None if way == "script" else "task")
    assert said in outcome.error
    assert not (tmp_path / "out").exists()
    assert left() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EDQUOT])
def test_transient_error_of_the_disk_is_retried(folder, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    one = task(files=str(folder))
    with monkeypatch.context() as patched:
        patched.setattr(initial_files, "_copy_file", fail)
        failed, _ = play(one)
    assert (failed.reward, failed.stop_reason, failed.boundary) == (None, "start_failed", None)
    assert os.strerror(number) in failed.error
    outcome, (notes,) = play(one, "notes()")
    assert (outcome.error, notes) == (None, "first")


@pytest.mark.parametrize("setting", ["", "--disk"])
def test_size_error_names_its_setting(folder, setting, tmp_path, monkeypatch):
    def hint(limit):
        with pytest.raises(UsageError) as caught:
            prepare_files(str(folder), Path(tempfile.mkdtemp(dir=tmp_path)), limit)
        return caught.value.hint

    assert (f"`{setting}`" in hint(SizeLimit(1, setting))) == bool(setting)
    monkeypatch.setattr(initial_files, "MAX_ENTRIES", 1)
    assert "`" not in hint(SizeLimit(1000, setting))


def test_gateway_error_of_files_names_its_flags(folder, tmp_path):
    (tmp_path / "session").mkdir()
    runtime = CommandRuntime([sys.executable], SandboxLimits(disk=1), folder)
    with pytest.raises(PrepareError) as caught:
        asyncio.run(runtime.launch("", tmp_path / "session", {}))
    assert (caught.value.code, caught.value.at) == ("BK-FILE-UNREADABLE", "--files")
    assert "`--disk`" in caught.value.hint


@pytest.mark.parametrize(("number", "is_final"), [(errno.EMFILE, False), (errno.ENOENT, True)])
def test_only_a_final_start_error_has_the_install_hint(number, is_final, monkeypatch):
    async def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(StartError) as caught:
        asyncio.run(ServerProcess.start(["server"], env={}, name="notes"))
    assert (caught.value.final, caught.value.hint is not None) == (is_final, is_final)
    assert caught.value.code == "BK-MCP-START"


def test_missing_or_unreachable_files_are_refused_at_load(tmp_path):
    with pytest.raises(UsageError, match="/nowhere"):
        McpEnvironment(config(), {"train": [task(files="/nowhere")]})
    far = task(mcp_config={"notes": {"url": "http://localhost:1/mcp"}}, files=str(tmp_path))
    with pytest.raises(UsageError, match="cannot read"):
        McpEnvironment(config(), {"train": [far]})


async def opened(one):
    async with open_workdir(one, config()):
        await asyncio.sleep(0)


def test_workdir_is_removed_after_cancellation_at_any_await(tmp_path):
    (tmp_path / "notes.txt").write_text("first")
    at = 0
    while asyncio.run(cancelled_at(lambda: opened(task(files=str(tmp_path))), at)):
        assert left() == []
        at += 1
    assert at >= 3


@pytest.mark.parametrize(
    "at", [*range(0, 8, 3), *(pytest.param(at, marks=pytest.mark.slow) for at in range(60))]
)
def test_cancelled_rollout_leaves_no_folder_and_no_process(marked, at):
    asyncio.run(cancelled_at(lambda: played(marked, "add('mine')", "notes()"), at))
    assert left() == []


class Filling(Scripted):
    """Policy that fills the folder, polls until the limit is reported, and ends."""

    async def chat(self, messages, *, tools=()):
        noticed = "exceeded its size limit" in messages[-1]["content"]
        call = "done()" if noticed else "notes()" if len(messages) > 2 else "fill(200000)"
        self._replies = [f"<tool>{call}</tool>"]
        return await super().chat(messages, tools=tools)


def test_workdir_above_limit_ends_servers_and_is_graded():
    small = config(defaults={"workdir_bytes": 100_000, "max_turns": 100_000})
    gym = McpEnvironment(small, {"train": [task()]})
    outcome = asyncio.run(gym.rollout(gym.tasks("train")[0], Filling()))
    assert (outcome.error, outcome.reward) == (None, 0.0)
    assert outcome.components["server_lost_by_call"] == 1.0


def test_keep_workdir_moves_folders(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kept = config(defaults={"keep_workdir": str(tmp_path / "kept")})
    play(task(id="a/b c"), "add('mine')", gym=kept)
    (folder,) = (tmp_path / "kept").iterdir()
    assert folder.name.startswith("a_b_c-")
    assert (folder / "work" / "notes.txt").read_text() == "mine\n"
    assert f": {folder / 'work'}" in caplog.text


def test_folder_that_cannot_be_kept_is_removed(tmp_path):
    (tmp_path / "file").touch()
    outcome, _ = play(task(), "add('mine')", gym=config(defaults={"keep_workdir": str(tmp_path / "file")}))
    assert outcome.error is None
    assert left() == []


def test_daemon_of_server_ends_with_server(marked):
    outcome, said = play(marked, "daemon()")
    assert (outcome.error, said) == (None, ["left behind"])


def test_grandchild_without_session_and_environment_ends_with_server(marked):
    probe = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    group = create_control_group(probe.pid)
    probe.communicate(b"\n")
    if group is None:
        pytest.skip("no control group can be made here")
    kill_control_group(group)
    outcome, said = play(marked, "hide()")
    assert (outcome.error, said) == (None, ["hidden"])
    assert list(group.parent.glob(f"buckeye-server-{os.getpid()}-*")) == []


RIGHT = {"state": {"file": "answer.txt", "contains": "right"}}
WRONG = "open('answer.txt', 'w').write('wrong')"
SPOILT = {
    "the folder is removed": "shutil.rmtree(os.path.dirname(os.getcwd()))",
    "it is a link to a right one": "os.chdir('..'); shutil.rmtree('work'); os.symlink(OTHER, 'work')",
    "all around it is a link": "os.chdir('../..'); shutil.rmtree(HERE); os.symlink(OTHER, HERE)",
}
WRITES = "while True: open(str(id(object())), 'w')"
SPOILT_SLOWLY = {
    "the server is killed": "os.kill(os.getpid(), 9)",
    "it ends": "sys.exit(3)",
    "it says too much": "sys.stdout.write('x' * 20_000_000)",
    "it says no more": "os.close(1)",
    "folders without end": "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "a pipe": "os.remove('answer.txt'); os.mkfifo('answer.txt')",
    "a file of a terabyte": "open('answer.txt', 'w').truncate(10**12)",
    "a child that writes": f"subprocess.Popen([sys.executable, '-c', {WRITES!r}])",
    "no rights": "os.chmod('.', 0)",
}


@pytest.mark.parametrize(
    "code",
    [*SPOILT.values(), *(pytest.param(code, marks=pytest.mark.slow) for code in SPOILT_SLOWLY.values())],
    ids=[*SPOILT, *SPOILT_SLOWLY],
)
def test_damaged_workdir_scores_0(tmp_path, code):
    """A damaged folder scores 0, not an error that would be left out; files of others are kept."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "answer.txt").write_text("right")
    said = f"OTHER, HERE = {str(other)!r}, os.path.basename(os.path.dirname(os.getcwd()))"
    calls = [f"run({json.dumps(WRONG)})", f"run({json.dumps(f'{said}{chr(10)}{code}')})"]
    one = task(evaluate_tool=[], grade=RIGHT)
    outcome, _ = play(one, *calls)
    assert (outcome.error, outcome.reward) == (None, 0.0)
    assert (other / "answer.txt").read_text() == "right"


def test_slow_calls_end_rollout_at_time_limit(monkeypatch):
    """The orchestrator ends a rollout without a reward after its timeout, so the rollout must end earlier."""
    monkeypatch.setattr("buckeye.mcp.rollout._GRADING_SHARE", 0.9)
    one = task(evaluate_tool=[], grade=RIGHT)
    calls = ["run('time.sleep(0.4)')"] * 100

    async def only_outcome():
        return (await played(one, *calls))[0]

    outcome = asyncio.run(run_rollout(only_outcome, 20.0))
    assert (outcome.error, outcome.reward, outcome.stop_reason) == (None, 0.0, "time_limit")


TEXTS = st.text("ab{}/\\ workdir", max_size=20)
LEAVES = TEXTS | st.sampled_from(["{workdir}", "in {workdir}/x"]) | st.integers()
VALUES = st.lists(LEAVES | st.dictionaries(TEXTS, LEAVES, max_size=3), max_size=4)


@given(VALUES)
def test_mask_workdir_reverses_expand_workdir(value):
    workdir = Workdir(root=Path("/somewhere/private"))
    placed = workdir.expand_workdir(value)
    assert "{workdir}" not in json.dumps(list(_texts(placed)))
    assert workdir.mask_workdir(placed) == value


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
