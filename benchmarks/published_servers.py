"""Try published MCP servers unmodified: install, `rl init`, two tasks, one training step of a tiny model.

    python benchmarks/published_servers.py [--folder DIR] [NAME ...]

Needs PyPI, the npm registry, `uv` and `npm`. Every server has a separate folder below `--folder` (a temporary
one by default) with its installation, files and output. It prints a row of
docs/tutorials/published-server.md for each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKEYE = [sys.executable, "-m", "buckeye"]
LIMIT = 300.0
"""Timeout of a command in seconds."""
Task = tuple[str, Mapping[str, Any]]


def no_files(folder: Path) -> None:
    """Leave the folder empty."""
    del folder


def repository(folder: Path) -> None:
    """Make a repository with one commit and a file that is not committed."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "a.txt").write_text("one\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    (folder / "b.txt").write_text("two\n")


def database(folder: Path) -> None:
    """Make a database of a shop with two items."""
    with sqlite3.connect(folder / "shop.db") as shop:
        shop.execute("create table items (name text, price real)")
        shop.executemany("insert into items values (?, ?)", [("apple", 1.5), ("pear", 2.0)])
    shop.close()


def notes(folder: Path) -> None:
    """Write two text files."""
    (folder / "todo.txt").write_text("buy milk\n")
    (folder / "readme.md").write_text("# Title\n")


def checklist(folder: Path) -> None:
    """Write a day's log."""
    (folder / "monday.md").write_text("- [ ] begin\n")


@dataclass(frozen=True, kw_only=True)
class Server:
    """Published server: its packages, command, files, tools and tasks.

    In the command, `{bin}` is the folder of its programs and `{data}` that of its files. Without tools, a
    model gets all that `rl init` maps. `port` is that of an HTTP server. `needed` is what a user must know to
    train on it.
    """

    registry: str
    packages: Sequence[str]
    start: str
    state: str
    tasks: Sequence[Task]
    files: Callable[[Path], None] = no_files
    include: Sequence[str] = ()
    port: int | None = None
    needed: str = ""


SERVERS = {
    "time": Server(
        registry="PyPI",
        packages=["mcp-server-time"],
        start="{bin}/mcp-server-time",
        state="none",
        tasks=[("What is 12:00 of Europe/London in Asia/Tokyo?", {"calls": {"tool": "convert_time"}})],
    ),
    "calculator": Server(
        registry="PyPI",
        packages=["mcp-server-calculator", "mcp<2"],
        start="{bin}/mcp-server-calculator",
        state="none",
        tasks=[("What is 6*7?", {"result": {"tool": "calculate", "number": 42}})],
        needed="`mcp<2` beside it",
    ),
    "dice": Server(
        registry="PyPI",
        packages=["mcp-dice-roller", "mcp<2"],
        start="{bin}/mcp-dice-roller",
        state="none, chance",
        tasks=[("Flip a coin.", {"calls": {"tool": "flip_coin"}})],
        needed="`mcp<2` beside it",
    ),
    "chess": Server(
        registry="PyPI",
        packages=["chess-esca-mcp"],
        start="{bin}/chess-esca-mcp",
        state="none; long descriptions",
        tasks=[("Which moves does White have at the start?", {"calls": {"tool": "legal_moves"}})],
        include=["position", "legal_moves", "facts"],
        needed="Python 3.12; `--include`: its tools are described at length",
    ),
    "fetch": Server(
        registry="PyPI",
        packages=["mcp-server-fetch"],
        start="{bin}/mcp-server-fetch",
        state="the web",
        tasks=[("Read https://example.com.", {"calls": {"tool": "fetch"}})],
        needed="a network: without one all calls are refused",
    ),
    "arxiv": Server(
        registry="PyPI",
        packages=["arxiv-mcp-server"],
        start="{bin}/arxiv-mcp-server --storage-path {data}",
        state="folder, the web; slow",
        tasks=[("List the papers.", {"calls": {"tool": "list_papers"}})],
        include=["list_papers", "read_paper", "list_watches"],
        needed="`--include`: 19 tools; most need a network",
    ),
    "git": Server(
        registry="PyPI",
        packages=["mcp-server-git"],
        start="{bin}/mcp-server-git --repository {data}",
        state="repository",
        tasks=[("Stage b.txt.", {"calls": {"tool": "git_add"}})],
        files=repository,
    ),
    "sqlite": Server(
        registry="PyPI",
        packages=["mcp-server-sqlite", "mcp<2"],
        start="{bin}/mcp-server-sqlite --db-path {data}/shop.db",
        state="database file",
        tasks=[
            (
                "Delete the pear.",
                {"state": {"database": "shop.db", "query": "select count(*) from items", "number": 1}},
            )
        ],
        files=database,
        needed="`mcp<2` beside it",
    ),
    "duckdb": Server(
        registry="PyPI",
        packages=["mcp-server-motherduck"],
        start="{bin}/mcp-server-motherduck --db-path :memory: --read-write",
        state="database in memory",
        tasks=[("Which databases are there?", {"result": {"tool": "list_databases", "contains": "memory"}})],
    ),
    "text-editor": Server(
        registry="PyPI",
        packages=["mcp-text-editor", "mcp<2"],
        start="{bin}/mcp-text-editor",
        state="files anywhere",
        tasks=[("Read todo.txt.", {"calls": {"tool": "get_text_file_contents"}})],
        files=notes,
        needed="`mcp<2` beside it",
    ),
    "excel": Server(
        registry="PyPI",
        packages=["excel-mcp-server"],
        start="{bin}/excel-mcp-server stdio",
        state="files anywhere; 36 tools",
        tasks=[("Make the workbook /tmp/a.xlsx.", {"calls": {"tool": "create_workbook"}})],
        include=["create_workbook", "describe_workbook", "create_sheet"],
        needed="`--include`: 36 tools",
    ),
    "word": Server(
        registry="PyPI",
        packages=["office-word-mcp-server"],
        start="{bin}/word_mcp_server",
        state="files; 54 tools",
        tasks=[("Make the document a.docx.", {"state": {"file": "a.docx", "exists": True}})],
        include=["create_document", "add_heading", "get_document_text"],
        needed="`--include`: 54 tools",
    ),
    "filesystem": Server(
        registry="npm",
        packages=["@modelcontextprotocol/server-filesystem"],
        start="node {bin}/mcp-server-filesystem {data}",
        state="folder",
        tasks=[("Make the folder plum.", {"state": {"file": "plum", "exists": True}})],
        files=notes,
        include=["create_directory", "list_directory", "write_file"],
    ),
    "memory": Server(
        registry="npm",
        packages=["@modelcontextprotocol/server-memory"],
        start="env MEMORY_FILE_PATH={data}/memory.jsonl node {bin}/mcp-server-memory",
        state="knowledge graph in a file",
        tasks=[("Remember that Ann is a person.", {"state": {"tool": "read_graph", "contains": "Ann"}})],
        files=lambda folder: (folder / "memory.jsonl").touch(),
        include=["create_entities", "search_nodes", "read_graph"],
        needed="`MEMORY_FILE_PATH`: the default is a file next to its program",
    ),
    "memory-bank": Server(
        registry="npm",
        packages=["@allpepper/memory-bank-mcp"],
        start="env MEMORY_BANK_ROOT={data} node {bin}/mcp-server-memory-bank",
        state="long-lived memory in a folder",
        tasks=[("Which projects are there?", {"calls": {"tool": "list_projects"}})],
        files=lambda folder: (folder / "garden").mkdir(),
        needed="`MEMORY_BANK_ROOT`",
    ),
    "thinking": Server(
        registry="npm",
        packages=["@modelcontextprotocol/server-sequential-thinking"],
        start="node {bin}/mcp-server-sequential-thinking",
        state="in its process; a long description",
        tasks=[("Think in two steps.", {"calls": {"tool": "sequentialthinking", "at_least": 2}})],
        include=["sequentialthinking"],
    ),
    "tasks": Server(
        registry="npm",
        packages=["mcp-shrimp-task-manager"],
        start="env DATA_DIR={data} node {bin}/mcp-shrimp-task-manager",
        state="folder; long descriptions",
        tasks=[("List all tasks.", {"calls": {"tool": "list_tasks"}})],
        files=notes,
        include=["list_tasks", "query_task", "clear_all_tasks"],
        needed="`DATA_DIR`; `--include`: one tool is described in 3,575 characters",
    ),
    "everything": Server(
        registry="npm",
        packages=["@modelcontextprotocol/server-everything"],
        start="node {bin}/mcp-server-everything",
        state="in its process; one slow tool",
        tasks=[("Say plum by echo.", {"result": {"tool": "echo", "contains": "plum"}})],
        include=["echo", "get-sum", "trigger-long-running-operation"],
    ),
    "options": Server(
        registry="PyPI",
        packages=["abacus-mcp"],
        start="{bin}/abacus stdio",
        state="none; 39 tools in 138,000 characters; the newer protocol alone",
        tasks=[("What is put-call parity at 1, 1, 1, 1, 1?", {"calls": {"tool": "put_call_parity"}})],
        include=["put_call_parity", "option_price_bounds"],
        needed="`--include`: 39 tools",
    ),
    "learning-memory": Server(
        registry="PyPI",
        packages=["mem-learn", "mcp<2"],
        start="MEMORY_DB_PATH=./memory.db {bin}/python -m mem_learn",
        state="database file",
        tasks=[("Remember plum.", {"state": {"file": "memory.db", "exists": True}})],
        needed="`mcp<2` beside it",
    ),
    "task-manager": Server(
        registry="npm",
        packages=["@kazuph/mcp-taskmanager"],
        start="node {bin}/mcp-taskmanager",
        state="file below the home folder; long descriptions",
        tasks=[("Plan to buy milk.", {"calls": {"tool": "request_planning"}})],
    ),
    "calc": Server(
        registry="npm",
        packages=["@coo-quack/calc-mcp"],
        start="node {bin}/calc-mcp",
        state="none; 21 tools",
        tasks=[("Which semver is valid, 1.2?", {"calls": {"tool": "semver"}})],
        include=["semver", "math", "base"],
        needed="`--include`: 21 tools",
    ),
    "kanban": Server(
        registry="PyPI",
        packages=["kanbanger"],
        start="{bin}/kanbanger-mcp",
        state="files of a project, made by one of its tools",
        tasks=[
            ("Set the project up.", {"state": {"file": "_kanban.md", "exists": True}}),
            ("Which tasks are there?", {"calls": {"tool": "list_tasks"}}),
        ],
        include=["setup_project", "add_task", "list_tasks"],
        needed="`--include`: long descriptions",
    ),
    "worklog": Server(
        registry="PyPI",
        packages=["worklog-mcp"],
        start="{bin}/worklog-mcp serve --dir {data}",
        state="the newest file of a folder",
        tasks=[
            ("I have bought milk.", {"state": {"file": "monday.md", "contains": "milk"}}),
            ("Is there a log?", {"result": {"tool": "check", "json_path": "$.status", "exact": "ok"}}),
        ],
        files=checklist,
        needed="Python 3.13",
    ),
    "flashcards": Server(
        registry="PyPI",
        packages=["spacedrep[mcp]", "mcp<2"],
        start="env SPACEDREP_DB={data}/cards.db {bin}/spacedrep-mcp",
        state="database file, made by one of its tools",
        tasks=[
            ("Make the database.", {"state": {"file": "cards.db", "exists": True}}),
            ("Which decks are there?", {"calls": {"tool": "list_decks"}}),
        ],
        include=["init_database", "add_card", "list_decks"],
        needed="`mcp<2` next to it, Python 3.12, `SPACEDREP_DB`, `--include`: 27 tools",
    ),
    "timer": Server(
        registry="PyPI",
        packages=["mcp-timer", "mcp<2"],
        start="{bin}/mcp-timer",
        state="none; slow",
        tasks=[("Wait for a second.", {"calls": {"tool": "wait", "at_most": 1}})],
        needed="`mcp<2` beside it",
    ),
    "knowledge-graph": Server(
        registry="npm",
        packages=["@itseasy21/mcp-knowledge-graph"],
        start="node {bin}/mcp-knowledge-graph --memory-path {data}/memory.jsonl",
        state="knowledge graph in a file",
        tasks=[
            ("Remember that Ann is a person.", {"state": {"tool": "read_graph", "contains": "Ann"}}),
            ("What do you know?", {"calls": {"tool": "read_graph"}}),
        ],
        include=["create_entities", "search_nodes", "read_graph"],
        needed="`--memory-path`: the default is a file next to its program",
    ),
    "stories": Server(
        registry="npm",
        packages=["@stevestomp/ohno-mcp"],
        start="env OHNO_DB_PATH={data}/tasks.db node {bin}/ohno-mcp",
        state="database file; 28 tools",
        tasks=[
            ("Make the task plum.", {"calls": {"tool": "create_task"}}),
            ("Which tasks are there?", {"calls": {"tool": "get_tasks"}}),
        ],
        include=["create_task", "get_tasks", "get_project_status"],
        needed="`OHNO_DB_PATH`, `--include`: 28 tools",
    ),
    "databases": Server(
        registry="npm",
        packages=["@cmd233/mcp-database-server"],
        start="node {bin}/mcp-database-server {data}/shop.db",
        state="database file",
        tasks=[
            (
                "Delete the pear.",
                {"state": {"database": "shop.db", "query": "select count(*) from items", "number": 1}},
            ),
            ("Which tables are there?", {"result": {"tool": "list_tables", "contains": "items"}}),
        ],
        files=database,
        include=["write_query", "list_tables", "read_query"],
    ),
    "everything-http": Server(
        registry="npm",
        packages=["@modelcontextprotocol/server-everything"],
        start="env PORT={port} node {bin}/mcp-server-everything streamableHttp",
        state="one process for all; streamable HTTP",
        tasks=[("Say plum by echo.", {"result": {"tool": "echo", "contains": "plum"}})],
        include=["echo", "get-sum"],
        port=3951,
    ),
    "excel-http": Server(
        registry="PyPI",
        packages=["excel-mcp-server"],
        start="env EXCEL_FILES_PATH={data} {bin}/excel-mcp-server streamable-http --port {port}",
        state="one folder for all; streamable HTTP",
        tasks=[("Make the workbook a.xlsx.", {"calls": {"tool": "create_workbook"}})],
        include=["create_workbook", "describe_workbook"],
        port=3952,
        needed="`EXCEL_FILES_PATH`; `--include`: 36 tools",
    ),
}


def main() -> None:
    """Try servers in sequence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*SERVERS, []], help="which; all by default")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="servers-"))
    print(
        "| server | version | state | needed | install, init, step (s) | result |\n|---|---|---|---|---|---|"
    )
    for name in given.names or SERVERS:
        print(row(name, SERVERS[name], (folder / name).absolute()), flush=True)


def row(name: str, server: Server, folder: Path) -> str:
    """Try one server in its folder; return the result as a line of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds: list[str] = []
    version, result = "", "trained"
    try:
        started = time.monotonic()
        programs, version = install(server, folder)
        seconds.append(f"{time.monotonic() - started:.0f}")
        for stage in (init, train):
            started = time.monotonic()
            with served(server, programs, folder):
                stage(server, programs, folder)
            seconds.append(f"{time.monotonic() - started:.0f}")
        result = what_was_trained(folder)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        result = f"{error.cmd[0]} ended with {error.returncode}: {lines[-1][:150] if lines else ''}"
    except subprocess.TimeoutExpired as error:
        result = f"no end within {error.timeout:g} s"
    package = f"{name}: {server.registry} `{server.packages[0]}`"
    cells = [package, version, server.state, server.needed or "nothing", ", ".join(seconds), result]
    return f"| {' | '.join(cells)} |"


def install(server: Server, folder: Path) -> tuple[Path, str]:
    """Install the server into the folder; return the folder of its programs, and its version."""
    name = server.packages[0]
    if server.registry == "npm":
        run(["npm", "install", "--silent", "--no-fund", "--prefix", str(folder), name], folder, "install")
        package = json.loads((folder / "node_modules" / name / "package.json").read_text())
        return folder / "node_modules" / ".bin", package["version"]
    uv, venv = shutil.which("uv") or f"{sys.prefix}/bin/uv", folder / "venv"
    asked = os.environ.get("SERVERS_PYTHON", sys.executable)
    run([uv, "venv", "-q", "--clear", "-p", asked, str(venv)], folder, "install")
    run([uv, "pip", "install", "-q", "-p", f"{venv}/bin/python", *server.packages], folder, "install")
    listed = run([uv, "pip", "list", "-p", f"{venv}/bin/python", "--format", "json"], folder, "install")
    return venv / "bin", next(
        one["version"] for one in json.loads(listed) if one["name"] == name.partition("[")[0]
    )


def init(server: Server, programs: Path, folder: Path) -> None:
    """Run `rl init`, and write the tasks that a user would write."""
    for old in ("configs", "data"):
        shutil.rmtree(folder / old, ignore_errors=True)
    (folder / "data").mkdir()
    server.files(folder / "data")
    where = [address(server)] if server.port else ["--command", command(server, programs, folder)]
    chosen = [word for tool in server.include for word in ("--include", tool)]
    said = run(
        [*BUCKEYE, "rl", "init", *where, *chosen, "-o", "configs/env.yaml"], folder, "init", fails=True
    )
    written = folder / "configs" / "env.yaml"
    if not written.exists():
        raise subprocess.CalledProcessError(1, ["rl init"], stderr=said)
    text = written.read_text()
    named = re.search(r"^    server: (.*)$", text, re.M)
    there = json.loads(named[1]) if named else {"url": address(server)}
    written.write_text(re.sub(r"max_turns: \d+", "max_turns: 3", text))
    tasks = [
        {"id": f"{number}", "prompt": prompt, "mcp_config": {"environment": there}, "grade": grade}
        for number, (prompt, grade) in enumerate([*server.tasks, *server.tasks])
    ]
    (folder / "tasks.json").write_text(json.dumps(tasks, indent=1))


def train(server: Server, programs: Path, folder: Path) -> None:
    """Make an untrained tiny model, and train it for one step."""
    for old in ("base", "run"):
        shutil.rmtree(folder / old, ignore_errors=True)
    size = ["--vocab-size", "384", "--layers", "1", "--hidden", "64", "--max-length", "8192"]
    run([*BUCKEYE, "model", "tiny", "base", "--corpus", "configs/env.yaml", *size], folder, "model")
    parts = ["--config", "configs/env.yaml", "--dataset", "tasks.json"]
    parts += ["--model", "base", "--output-dir", "run"]
    small = ["--orchestrator.batch-size", "8", "--orchestrator.rollouts-per-example", "4"]
    short = ["--max-steps", "1", "--seq-len", "8192", "--orchestrator.sampling.max-tokens", "24"]
    run([*BUCKEYE, "rl", *parts, "--yes", "--no-eval", *small, *short], folder, "train")


def what_was_trained(folder: Path) -> str:
    """Return the number of rollouts and errors of the first step."""
    lines = [json.loads(line) for path in (folder / "run/rollouts").glob("*.jsonl") for line in path.open()]
    errors = sum(line["reward"] is None for line in lines)
    return f"trained on {len(lines) - errors} rollouts" + (f", {errors} errors" if errors else "")


def command(server: Server, programs: Path, folder: Path) -> str:
    """Return the command that starts the server."""
    return server.start.format(bin=programs, data=folder / "data", port=server.port)


def address(server: Server) -> str:
    """Return the address of the server."""
    return f"http://127.0.0.1:{server.port}/mcp"


@contextmanager
def served(server: Server, programs: Path, folder: Path) -> Iterator[None]:
    """Run an HTTP server for the duration of the block."""
    if server.port is None:
        yield
        return
    (folder / "data").mkdir(exist_ok=True)
    argv = shlex.split(command(server, programs, folder))
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 90.0
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", server.port)):
                        break
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(10)


def run(argv: Sequence[str], folder: Path, stage: str, *, fails: bool = False) -> str:
    """Run a command in the folder, and log all output.

    Return standard output; if the command may fail (`fails`), also standard error.
    """
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, check=False
    )
    with (folder / f"{stage}.log").open("a") as log:
        log.write(f"$ {shlex.join(argv)}\n{done.stdout}{done.stderr}\n")
    if done.returncode and not fails:
        raise subprocess.CalledProcessError(done.returncode, [stage], done.stdout, done.stderr)
    return done.stdout + (done.stderr if fails else "")


if __name__ == "__main__":
    main()
