"""Without an extra, a command works or names the extra that it needs.

Each environment is a Python with Buckeye's code and the requirements of some extras, linked from the tests'
environment, and nothing else. (`test_installation.py` installs them.)
"""

import csv
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.evaluation.chat_server import chat_server
from tests.places import ROOT

from buckeye.base.distribution import DISTRIBUTION, requirements
from buckeye.cli.tree import BY_NAME

_PAGE = (ROOT / "docs" / "how-to" / "write-environments.md").read_text(encoding="utf-8")
CAPITALS = re.search(r"```python\n(.*?)```", _PAGE, re.S)[1]
RUN_TOML = """
trainer = {}
inference = {}
[model]
name = "no-owner/no-model"
[[orchestrator.env]]
id = "capitals.py"
"""
TASK = {
    "id": "one",
    "prompt": "Play.",
    "mcp_config": {"game": {"command": "false"}},
    "setup_tool": {"name": "setup", "arguments": {}},
    "evaluate_tool": {"name": "evaluate", "arguments": {}},
}
GYM = "system_prompt: Play.\nparser: {use_thinking: false}\n"
with (Path(__file__).parent / "uses.csv").open(encoding="utf-8", newline="") as table:
    USES = {row["command"]: row["extra"] or None for row in csv.DictReader(table)}
"""Commands with an effect, and the extra that each needs."""

DRIVER = """
import json, os, sys, tempfile
import buckeye.cli.typer_commands, buckeye.config.rl
from buckeye.cli.main import main
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        child = os.fork()  # what a command imports and changes is its own
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            sys.argv[:] = ["buckeye", *words]
            try:
                main()
            except SystemExit as end:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(end.code or 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([words, code, said.read().decode()]), flush=True)
"""


pytestmark = pytest.mark.e2e


class Place:
    """Folder with a Python that has Buckeye with some extras, and the objects that the commands name."""

    def __init__(self, folder, extras, finished):
        self.folder = folder
        self.python = linked(folder / "python", extras)
        (folder / "capitals.py").write_text(CAPITALS)
        (folder / "run.toml").write_text(RUN_TOML)
        (folder / "tasks.json").write_text(json.dumps([TASK]))
        (folder / "g.yaml").write_text(GYM)
        (folder / "key").write_text("0" * 64)
        (folder / "chats.jsonl").write_text('{"messages": []}\n')
        shutil.copytree(finished.root / "out", folder / "run")  # the commands may write here
        self._names = {"MODEL": str(finished.model), "RUN": str(folder / "run")}

    def carry_out(self, commands):
        """Run the commands; return exit code and output of each."""
        with (
            chat_server(lambda body, number: (401, "{}")) as (url, _),
            socket.create_server(("127.0.0.1", 0)) as taken,
        ):
            names = {**self._names, "PORT": str(taken.getsockname()[1]), "SERVER": url}
            argvs = [[names.get(word, word) for word in shlex.split(command)] for command in commands]
            done = self.run("-c", DRIVER, input=json.dumps(argvs))
        assert done.returncode == 0, done.stderr
        results = [json.loads(line) for line in done.stdout.splitlines()]
        return {command: result[1:] for command, result in zip(commands, results, strict=True)}

    def run(self, *words, **options):
        return subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "LANG": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            **options,
        )


def linked(folder, wanted_extras):
    """Create a Python with the requirements of these extras and the source of Buckeye."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/*/site-packages"))
    queue, seen = [Requirement(line) for line in requirements(wanted_extras)], set()
    while queue:
        wanted = queue.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        try:
            there = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        if key in seen:
            continue
        seen.add(key)
        for top in {path.parts[0] for path in there.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(there.locate_file(top))
        extras = [{"extra": extra} for extra in ("", *wanted.extras)]
        for needed in map(Requirement, there.requires or ()):
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                queue.append(needed)
    known = f"{DISTRIBUTION.replace('-', '_')}-*.dist-info"
    for path in metadata.distribution(DISTRIBUTION).locate_file("").glob(known):
        (site / path.name).symlink_to(path)
    (site / "buckeye.pth").write_text(f"{ROOT / 'src'}\n")
    return folder / "bin" / "python"


def test_every_command_is_used():
    unused = {name for name in BY_NAME if not any(f"{use} ".startswith(f"{name} ") for use in USES)}
    assert unused == set()


@pytest.mark.parametrize("extra", [None, "mcp", "hub", "remote"])
def test_a_command_works_or_names_the_extra_it_needs(tmp_path, finished, extra):
    place = Place(tmp_path, [extra] if extra else [], finished)
    uses = {use: need for use, need in USES.items() if extra in (None, need)}
    uses |= {f"{name} --help": None for name in (BY_NAME if extra is None else ())}
    for command, (code, said) in place.carry_out(uses).items():
        need = uses[command] if extra is None else None
        assert code in ((0,) if command.endswith(" --help") else (0, 1, 2)), (command, said)
        assert "Traceback" not in said, (command, said)
        assert "unexpected" not in said, (command, said)
        named = re.findall(r"of the extra `(\w+)`", said)
        assert named == [need] * (need is not None), (command, said)
        assert need is None or (code == 2 and f"[{need}]'" in said), (command, said)


def test_the_extra_of_models_alone_trains_on_an_environment_of_a_python_file(tmp_path, finished):
    place = Place(tmp_path, ["model"], finished)
    words = ("rl", "@", "run.toml", "--model.name", str(finished.model), "--max-steps", "2")
    small = ("--orchestrator.batch-size", "8", "--orchestrator.rollouts-per-example", "4", "--seq-len", "128")
    done = place.run("-m", "buckeye", *words, *small, "--output-dir", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/weights/step_2/model.safetensors").is_file()
