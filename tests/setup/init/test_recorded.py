"""Every write of `buckeye rl init` and of the servers that it tries, as the kernel sees it (`strace`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.places import ROOT
from tests.setup.init.test_init import tool
from tests.setup.init.test_trial import GIT_CONFIG, needs_walls, seen, started

pytestmark = [pytest.mark.slow, needs_walls]

CALLS = (
    "openat,open,creat,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,link,linkat,"
    "truncate,chmod,fchmodat,chown,lchown,fchownat,utimensat,mknod,mknodat,setxattr,removexattr"
)
OPENED = re.compile(r"\bO_(?:WRONLY|RDWR|CREAT|TRUNC)\b")
AT = re.compile(r"(?:AT_FDCWD|\d+)<(?P<folder>[^>]*)>, \"(?P<path>[^\"]*)\"")
PLAIN = re.compile(r"\"(?P<path>[^\"]*)\"")
SERVERS = {
    "time": "uvx mcp-server-time",
    "git": "uvx mcp-server-git --repository {project}",
    "sqlite": "uvx --with mcp<2 mcp-server-sqlite --db-path {user}/x.db",
    "memory": "npx -y @modelcontextprotocol/server-memory",
    "filesystem": "npx -y @modelcontextprotocol/server-filesystem {user}",
    "everything": "npx -y @modelcontextprotocol/server-everything",
    "calculator": "uvx --with mcp<2 mcp-server-calculator",
    "text-editor": "uvx --with mcp<2 mcp-text-editor",
    "word": "uvx --from office-word-mcp-server word_mcp_server",
    "options": "uvx --from abacus-mcp abacus stdio",
    "learning-memory": "MEMORY_DB_PATH={user}/m.db uvx --with mem-learn --with mcp<2 python -m mem_learn",
    "thinking": "npx -y @modelcontextprotocol/server-sequential-thinking",
    "memory-bank": "MEMORY_BANK_ROOT={user} npx -y @allpepper/memory-bank-mcp",
    "calc": "npx -y @coo-quack/calc-mcp",
    "task-manager": "npx -y @kazuph/mcp-taskmanager",
    "tasks": "DATA_DIR={user} npx -y mcp-shrimp-task-manager",
    "excel": "uvx excel-mcp-server stdio",
    "kanban": "uvx --from kanbanger kanbanger-mcp",
    "worklog": "uvx -p 3.13 worklog-mcp serve --dir {project}",
    "flashcards": "SPACEDREP_DB={user}/c.db uvx -p 3.13 --with mcp<2 --from spacedrep[mcp] spacedrep-mcp",
    "timer": "uvx --with mcp<2 mcp-timer",
    "knowledge-graph": "npx -y @itseasy21/mcp-knowledge-graph --memory-path {user}/m.jsonl",
    "stories": "OHNO_DB_PATH={user}/t.db npx -y @stevestomp/ohno-mcp",
}


def written(log):
    """The paths that calls in a log of strace have written to."""
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"(?:\[pid +)?\d*\]? *(\w+)\(", line)
        if call is None or (call[1] in ("open", "openat") and not OPENED.search(line)):
            continue
        found = [os.path.normpath(os.path.join(one["folder"], one["path"])) for one in AT.finditer(line)]
        found = found or [one["path"] for one in PLAIN.finditer(line)]
        yield from found[-1:] if call[1].startswith("symlink") else found  # where it leads is not written to


def recorded(place, *words):
    """Run the command under strace: how it ended, and what was written outside of its scratch and output."""
    log = place / "strace.log"
    strace = ["strace", "-f", "--seccomp-bpf", "-z", "-y", "-s", "4096", "-qq"]
    strace += ["-e", f"trace={CALLS}", "-o", str(log)]
    kept = {name: value for name, value in os.environ.items() if "CERT" in name or name == "SSL_CERT_DIR"}
    env = kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place / "home"),
        "PYTHONDONTWRITEBYTECODE": "1",  # of Buckeye itself
        "TMPDIR": str(place / "tmp"),
    }
    argv = [*strace, sys.executable, "-m", "buckeye", "rl", "init", *words]
    done = subprocess.run(argv, cwd=place / "work", env=env, capture_output=True, text=True, check=False)
    allowed = (
        place / "home" / ".cache" / "buckeye",
        place / "work" / "configs",
        place / "tmp",
        Path("/dev"),
        Path("/proc"),
        Path("/sys/fs/cgroup"),  # where the kernel counts processes, by Buckeye itself
    )
    own = f"{ROOT}/"  # Python compiles what it imports of Buckeye
    # bubblewrap sees the old root there while it makes the new one
    paths = {path.removeprefix("/newroot") for path in written(log) if path.startswith("/")}
    paths = {path for path in paths if not _compiled(path, own)}
    return done, sorted(path for path in paths if not any(Path(path).is_relative_to(one) for one in allowed))


def _compiled(path, own):
    return path.startswith(own) and "__pycache__" in Path(path).parts


@pytest.fixture
def place(tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    for name in ("home/.cache", "work", "tmp", "user/project/.git"):
        (tmp_path / name).mkdir(parents=True)
    project = tmp_path / "user" / "project"
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".git" / "config").write_text(GIT_CONFIG.replace("\tworktree = /elsewhere\n", ""))
    (project / "a.txt").write_text("hello")
    return tmp_path


def test_what_a_hostile_tool_writes_stays_in_its_folder(place):
    outside = [place / "user" / "project" / "a.txt", place / "home" / "x", "/tmp/planted", "here"]
    program = started(place, [tool("write", " ".join(map(str, outside)))])
    done, wrote = recorded(place, "--command", f"{sys.executable} {program} {place / 'user'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert wrote == []


def test_the_record_is_not_empty_where_nothing_is_kept_apart(place):
    (place / "write.py").write_text("open('/tmp/buckeye-planted', 'w').close()\n")
    log = place / "log"
    strace = ["strace", "-f", "--seccomp-bpf", "-z", "-y", "-qq", "-e", f"trace={CALLS}", "-o", str(log)]
    subprocess.run([*strace, sys.executable, str(place / "write.py")], check=True)
    Path("/tmp/buckeye-planted").unlink()
    assert "/tmp/buckeye-planted" in set(written(log))


@pytest.mark.parametrize("command", SERVERS.values(), ids=SERVERS)
def test_published_servers_write_to_scratch_and_output_only(place, command):
    program = "npx" if "npx" in command else "uvx"
    if shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip(f"{program} is not installed")
    before = seen(place / "user")
    words = command.format(project=place / "user" / "project", user=place / "user")
    done, wrote = recorded(place, "--command", words, "--try-all")
    if "Failed to fetch" in done.stderr or "registry" in done.stderr:
        pytest.skip("the registry is not reachable")
    if "No interpreter found" in done.stderr or "python-build-standalone" in done.stderr:
        pytest.skip("its version of Python is not installed")
    unproven = "not proven: " in done.stdout  # all tools refused what was made up, or none could be mapped
    assert done.returncode == int(unproven), done.stdout + done.stderr
    assert wrote == []
    assert seen(place / "user") == before
