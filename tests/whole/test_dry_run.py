"""`--dry-run` in every command that has it and in every spelling, with a record of files and programs."""

import contextlib
import itertools
import os
import sys

import pytest
from tests.command import run_here
from tests.remote.landlord import KEY, Landlord, serve
from tests.run.conftest import ENVIRONMENT
from tests.run.made_runs import made_run
from tests.setup.recipe.rl_project import fill

from buckeye.cli.tree import BY_NAME, COMMANDS
from buckeye.cli.typer_commands import typer_command
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import to_recorded_form
from buckeye.trainer.model.tiny import train_tokenizer

RUN = """
output_dir = "outputs/new"
model.name = "tiny"
seq_len = 64
[trainer]
[orchestrator]
batch_size = 8
rollouts_per_example = 4
env = [{ id = "letters.py" }]
[inference]
"""
PRIME = ("--provider", "prime", "--gpus", "2xA100", "--max-hours", "2", "--yes")
SSH = ("--provider", "ssh", "--host", "me@127.0.0.1:1", "--yes")

STARTS = [  # arguments after `rl`, without the file that says what is trained
    (),
    ("--clean", "--output-dir", "outputs/old"),
    ("--resume", "--output-dir", "outputs/old"),
    PRIME,
    SSH,
]
CASES = {
    ("rl",): [
        *(("@", "run.toml", *words) for words in STARTS),
        ("@", "old.toml", *PRIME, "--resume"),
        *(words for words in ((), ("--yes",), PRIME, SSH)),
    ],
    ("rl", "resume"): [("outputs/old",), ("outputs/old", "--max-steps", "50")],
    ("rl", "clean"): [("outputs/old", "--yes"), ("outputs/old", "--yes", "--checkpoints", "1")],
    ("rl", "init"): [("buckeye.lock.yaml", "--force")],
    ("hf",): [
        ("tasks.json", "--name", "my-tasks", "--no-push", "--yes"),
        ("tasks.json", "--name", "my-org/my-tasks", "--yes"),
    ],
}
"""Calls that would write, start, order or delete something, for every command with --dry-run."""

PASSES_ON = [("rl", "resume")]  # unknown arguments are passed on to `rl`
ALL = [tuple(command.name.split()) for command in COMMANDS]


def takes_it(words):
    if BY_NAME[" ".join(words)].takes_settings:
        return words == ("rl",)
    options = [option for param in typer_command(" ".join(words)).params for option in param.opts]
    return "--dry-run" in options or words in PASSES_ON


def spellings(words, rest):
    """Yield a command with --dry-run in all spellings and positions."""
    for flag in (("--dry-run",), ("--dry_run",), ("--dry-run=true",), ("--dry-run", "true")):
        yield (*words, *rest, *flag)
    yield (*words, "--dry-run", *rest)


class Recorder:
    """Recorder of changes in folders, and of called programs and addresses."""

    def __init__(self):
        self.events = []
        self.watched = False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.watched and event in (
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
            "socket.connect",
        ):
            self.events.append((event, arguments))

    @contextlib.contextmanager
    def watching(self, *folders):
        before, self.events = snapshot(*folders), []
        self.watched = True
        try:
            yield
        finally:
            self.watched = False
        after = snapshot(*folders)
        self.touched = sorted(set(before.items()) ^ set(after.items()))


def snapshot(*folders):
    """Return (kind, time of the last change, content) of each path; links are not followed."""
    found = {}
    for path in itertools.chain.from_iterable([folder, *folder.rglob("*")] for folder in folders):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.fixture(scope="module")
def recorder():
    return Recorder()


@pytest.fixture(scope="module")
def landlord():
    one = Landlord()
    with serve(one) as url:
        one.url = url
        yield one


@pytest.fixture
def place(tmp_path, landlord, monkeypatch):
    """Project with everything that the cases name, a home, and programs that leave a trace when called."""
    project, home = tmp_path / "project", tmp_path / "home"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    fill(project)
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(project / "tiny")
    (project / "run.toml").write_text(RUN)
    (project / "old.toml").write_text(RUN.replace("outputs/new", "outputs/old"))
    old = made_run(
        project / "outputs" / "old",
        checkpoints=(5, 10),
        arguments=("@", "run.toml", "--output-dir", "outputs/old"),
        working_directory=str(project),
    )
    config = load_config(RLConfig, ["@", str(project / "old.toml")])
    with contextlib.chdir(project):
        (old / "configs" / "rl.json").write_text(to_json(to_recorded_form(config)))
    (old / "batches" / "step_1").mkdir(parents=True)
    (project / "letters.py").write_text(ENVIRONMENT)
    (project / "Dockerfile").write_text("FROM scratch\n")
    (project / "buckeye.lock.yaml").write_text(
        "image: my-env:latest\ntools:\n- name: go\n  description: ''\n  input_schema: {type: object}\n"
    )
    for program in ("sbatch", "docker", "podman", "buildah"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / program).write_text("#!/bin/sh\necho 1\ntouch called\n")
        (tmp_path / "bin" / program).chmod(0o755)
    variables = {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_RUNTIME_DIR": str(home),
        "HF_HOME": str(home / "hf"),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PRIME_API_KEY": KEY,
        "PRIME_API_BASE_URL": landlord.url,
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_"))}
    return project, home, kept | variables


@pytest.fixture
def call(place, recorder, landlord, monkeypatch):
    """Return a function that runs a command under the recorder, including programs that replace it."""
    project, home, environment = place

    # the proof starts a process for the clean start, and uv: tests/remote/test_proof.py
    monkeypatch.setattr("buckeye.remote.dry_run.obstacles", lambda *given, **named: [])

    def run(words):
        replaced = []
        landlord.requests.clear()
        monkeypatch.setattr(os, "execv", lambda _, argv: replaced.append(argv[3:]) or sys.exit(0))
        with recorder.watching(project, home):
            done = run_here(*words, cwd=project, env=environment)
            if replaced:
                done = run_here(*replaced[0], cwd=project, env=environment)
        done.asked = [method for method, _, _ in landlord.requests]
        port = int(landlord.url.rpartition(":")[2])
        done.events = [
            one for one in recorder.events if one[0] != "socket.connect" or one[1][1] != ("127.0.0.1", port)
        ]
        done.touched = recorder.touched
        return done

    return run


def test_every_command_that_takes_it_has_a_case_here():
    assert {words for words in ALL if takes_it(words)} == set(CASES)


@pytest.mark.parametrize(
    ("words", "rest"),
    [(words, rest) for words, calls in CASES.items() for rest in calls],
    ids=lambda one: " ".join(one) or "-",
)
def test_nothing_is_touched(call, words, rest):
    for said in spellings(words, rest) if rest == CASES[words][0] else [(*words, *rest, "--dry-run")]:
        done = call(said)
        assert done.returncode in (0, 2), done.stderr
        assert (done.touched, done.events, set(done.asked) - {"GET"}) == ([], [], set()), said
        assert "--debug" not in done.stderr, done.stderr
        if said[-1:] == ("--dry-run",):
            assert done.returncode == 0, (said, done.stderr)


@pytest.mark.parametrize("rest", STARTS[:1] + STARTS[3:4] + STARTS[6:7], ids=lambda one: " ".join(one) or "-")
def test_nothing_is_touched_if_the_file_says_it(call, place, rest):
    (place[0] / "run.toml").write_text(f"dry_run = true\n{RUN}")
    done = call(("rl", "@", "run.toml", *rest))
    assert (done.returncode, done.touched, done.events) == (0, [], []), done.stderr


@pytest.mark.parametrize("words", [words for words in ALL if not takes_it(words)], ids=" ".join)
def test_where_there_is_none_it_is_refused_and_not_ignored(call, words):
    rest = ("@", "run.toml") if words in (("rl", "doctor"), ("rl", "tune"), ("fetch",)) else ("x",)
    for said in ((*words, *rest, "--dry-run"), (*words, "--dry-run", *rest)):
        done = call(said)
        assert (done.returncode, done.touched, done.events, done.asked) == (2, [], [], []), done.stderr
        assert "dry-run" in done.stderr or "dry_run" in done.stderr


def test_without_it_the_record_is_not_empty(call):
    done = call(("rl", "clean", "outputs/old", "--yes"))
    assert (done.returncode, done.touched != []) == (0, True)


def test_a_dry_run_elsewhere_says_what_is_ordered_and_sent(call):
    done = call(("rl", "@", "run.toml", *PRIME, "--dry-run"))
    for part in ("2xA100_80GB", "datacrunch", "$2.58", "letters.py"):
        assert part in done.stdout
    assert "me@127.0.0.1:1" in call(("rl", "@", "run.toml", *SSH, "--dry-run")).stdout
