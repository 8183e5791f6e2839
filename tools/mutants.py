"""Make random small changes in the core and report those that no test detects.

    python tools/mutants.py [--count 120] [--seed 0] [--room NAME ...] [--report FILE]

A mutant is a module with one change: `<` for `<=`, `and` for `or`, a number increased by one, a call left
out. Each is applied in a copy of the working tree and runs the fast tests of its room that cover the changed
line (found by running them once under `coverage`). Survivors are printed for a person to judge: some changes
make no difference that matters.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("hypothesis", "jinja2", "pydantic", "safetensors.torch", "torch", "transformers", "pytest")
"""Third-party packages, imported once; every mutant is a fork of this process."""
MEMORY = 16 * 2**30
TIMEOUT = (60.0, 10.0)
"""Timeout of a mutant: extra seconds, and a factor of its tests' duration."""


@dataclass(frozen=True, slots=True)
class Room:
    """Modules (globs under src/buckeye) and their tests."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "losses": Room(("trainer/losses/*.py", "trainer/batch_loss.py"), ("tests/trainer",)),
    "packing": Room(("trainer/data/packing.py", "trainer/batch_receiver.py"), ("tests/trainer",)),
    "grading": Room(("mcp/grading/*.py",), ("tests/mcp/grading",)),
    "samples": Room(("orchestrator/training_samples.py", "orchestrator/rollout.py"), ("tests/orchestrator",)),
    "advantages": Room(
        ("orchestrator/advantages.py", "orchestrator/collected_groups.py"), ("tests/orchestrator",)
    ),
    "collector": Room(
        ("orchestrator/collector.py", "orchestrator/deterministic_sampling.py"), ("tests/orchestrator",)
    ),
    "tasks": Room(("orchestrator/task_sampler.py",), ("tests/orchestrator",)),
    "batches": Room(
        ("transport/*.py", "orchestrator/batch.py"),
        ("tests/transport", "tests/orchestrator", "tests/remote/test_object_store.py"),
    ),
    "checkpoints": Room(
        ("transport/checkpoint/*.py",),
        ("tests/checkpoint", "tests/run/test_restarts.py", "tests/run/test_export.py"),
    ),
    "progress": Room(
        ("launch/progress.py", "monitor/metrics.py", "launch/plan.py", "launch/preflight/memory_plan.py"),
        (
            *("tests/run/test_progress.py", "tests/monitor/test_metrics.py", "tests/run/test_status.py"),
            *("tests/run/test_plan.py", "tests/run/preflight"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `source[start:end]`, in bytes, becomes `text`."""

    path: Path
    lines: range
    start: int
    end: int
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """Return the module with the change."""
        return source[: self.start] + self.text + source[self.end :]


# --- possible changes ---

_REPLACEMENTS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield replacements of a node."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Expr | ast.Continue | ast.Break | ast.AugAssign) and not is_docstring:
        yield ast.Pass()
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        for other in _REPLACEMENTS.get(type(node.op), ()):
            yield _with(node, op=other())
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in _REPLACEMENTS[type(operator)]:
                yield _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{name: getattr(node, name) for name in node._fields} | fields)


def _mutable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those of annotations, decorators and messages."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert) or not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.Call) and "log" in ast.unparse(node.func):
                continue
            yield node
            yield from _mutable_nodes(node)


def mutants_of(path: Path) -> list[Mutant]:
    """Return all mutants of a module."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in _mutable_nodes(ast.parse(source)):
        for variant in variants(node):
            old, new = (node.test, variant.test) if isinstance(node, ast.If | ast.While) else (node, variant)
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(new, ast.expr):
                text = f"({text})"
            mutants.append(Mutant(path, range(old.lineno, old.end_lineno + 1), start, end, text.encode()))
    return mutants


# --- tests in a fork of this process ---


def run_in_fork(work: Callable[[], int], *, seconds: float, output: Path) -> int | None:
    """Run `work` in a fork; return its exit code, or None if it exceeds the time or memory limit."""
    pid = os.fork()
    if not pid:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(work())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_tests(copy: Path, args: list[str], plugin: object = None) -> int:
    """Run pytest on a copy, in this process."""
    import pytest

    os.chdir(copy)
    sys.path[:0] = [str(copy / "src"), str(copy)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    options = ["-q", "-m", "not slow and not gpu and not e2e", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *args], plugins=[plugin] if plugin else []))


class Recorder:
    """Pytest plugin that records the lines that each test runs, and its duration."""

    def __init__(self, copy: Path, file: Path) -> None:
        import coverage

        self._coverage = coverage.Coverage(data_file=str(file), source=[str(copy / "src")], config_file=False)
        self._coverage.start()
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_protocol(self, item: object) -> None:
        """Switch the coverage context at the start of a test."""
        self._coverage.switch_context(item.nodeid)  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: object) -> None:
        """Add the duration of a test's part; a failed test takes infinitely long."""
        name = report.nodeid  # type: ignore[attr-defined]
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration  # type: ignore[attr-defined]
        if report.failed:  # type: ignore[attr-defined]
            self._seconds[name] = float("inf")

    def pytest_sessionfinish(self) -> None:
        """Write the records."""
        self._coverage.stop()
        self._coverage.save()
        self._file.with_suffix(".json").write_text(json.dumps(self._seconds))


class LineCoverage:
    """Tests that run a line, from a recorded run of them."""

    def __init__(self, file: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(file))
        self._data.read()
        self.seconds: dict[str, float] = json.loads(file.with_suffix(".json").read_text())
        files = Counter[str]()
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]] += seconds
        cheap_first = sorted(self.seconds, key=lambda name: files[name.partition("::")[0]])
        self._order = {name: index for index, name in enumerate(cheap_first)}

    @functools.cache  # noqa: B019  one object per set of tests
    def _by_line(self, path: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(path)

    def tests(self, path: Path, lines: range) -> list[str]:
        """Return the tests that run these lines, those of fast files first.

        For lines that run at import, return all tests that touch the module.
        """
        by_line = self._by_line(str(path))
        names = {test for line in lines for test in by_line.get(line, ())}
        if "" in names:
            names = {test for tests in by_line.values() for test in tests}
        passed = (test for test in names if self.seconds.get(test, float("inf")) < float("inf"))
        return sorted(passed, key=self._order.__getitem__)


def main() -> int:
    """Make mutants, run tests on them, and print the survivors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=120, help="number of mutants, divided evenly among the rooms"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", action="append", choices=ROOMS, help="only this room; may be repeated")
    parser.add_argument("--report", type=Path, help="file for the changes of the survivors")
    options = parser.parse_args()
    names = options.room or list(ROOMS)
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        copy_tree(copy)
        coverage = {
            tests: record(copy, tests, Path(folder)) for tests in {ROOMS[name].tests for name in names}
        }
        survivors = []
        for name in names:
            chosen = choose(copy, name, count=max(1, options.count // len(names)), seed=options.seed)
            survivors += try_all(copy, name, chosen, coverage[ROOMS[name].tests], Path(folder) / "output")
    text = "\n".join(survivors)
    if options.report:
        options.report.write_text(text)
    print(f"\n{text}\n{len(survivors)} survived; check each of them")
    return 0


def copy_tree(copy: Path) -> None:
    """Copy the files that git tracks, with changes in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def record(copy: Path, tests: tuple[str, ...], folder: Path) -> LineCoverage:
    """Run the tests once, without a change."""
    file = folder / "-".join(test.replace("/", "_") for test in tests)
    print(f"running {' '.join(tests)} without a change", flush=True)
    output = folder / "recording"
    run_in_fork(lambda: run_tests(copy, list(tests), Recorder(copy, file)), seconds=3600, output=output)
    if not file.with_suffix(".json").exists():
        sys.exit(f"error: the tests do not run:\n{output.read_text()[-3000:]}")
    return LineCoverage(file)


def choose(copy: Path, name: str, *, count: int, seed: int) -> list[Mutant]:
    """Return random mutants of a room."""
    modules = [path for glob in ROOMS[name].modules for path in sorted((copy / "src" / "buckeye").glob(glob))]
    possible = [mutant for path in modules for mutant in mutants_of(path)]
    return random.Random(f"{seed} {name}").sample(possible, min(count, len(possible)))


def try_all(copy: Path, name: str, mutants: list[Mutant], coverage: LineCoverage, output: Path) -> list[str]:
    """Return the changes of survivors; print the room's counts."""
    survivors = []
    ends: Counter[str] = Counter()
    for mutant in mutants:
        end, count = try_mutant(copy, mutant, coverage, output)
        ends[end] += 1
        if end == "survived":
            survivors.append(f"--- {name}: survived {count} tests\n{difference(copy, mutant)}")
            print(survivors[-1], flush=True)
    print(
        f"{name}: {len(mutants)} mutants, " + ", ".join(f"{n} {end}" for end, n in ends.items()), flush=True
    )
    return survivors


def try_mutant(copy: Path, mutant: Mutant, coverage: LineCoverage, output: Path) -> tuple[str, int]:
    """Return "killed", "hung" or "survived", and the number of tests that ran."""
    tests = coverage.tests(mutant.path, mutant.lines)
    if not tests:
        return "survived", 0
    source = mutant.path.read_bytes()
    try:
        mutant.path.write_bytes(mutant.applied(source))
        extra, factor = TIMEOUT
        seconds = extra + factor * sum(coverage.seconds[test] for test in tests)
        code = run_in_fork(lambda: run_tests(copy, ["-x", *tests]), seconds=seconds, output=output)
    finally:
        mutant.path.write_bytes(source)
    return ("hung" if code is None else "survived" if code == 0 else "killed"), len(tests)


def difference(copy: Path, mutant: Mutant) -> str:
    """Return the change as `diff -u` shows it."""
    source = mutant.path.read_bytes()
    before, after = (text.decode().splitlines() for text in (source, mutant.applied(source)))
    name = str(mutant.path.relative_to(copy))
    return "\n".join(difflib.unified_diff(before, after, name, name, lineterm="", n=2))


if __name__ == "__main__":
    sys.exit(main())
