"""Error codes and findings: each one in the source has an explanation, and `buckeye explain` prints it."""

import ast
import pickle
import re
import sys
from pathlib import Path

import pytest

import buckeye
from buckeye.analysis.diagnosis.chain import METRIC_FINDINGS
from buckeye.base.explanations import explanations
from buckeye.cli.main import main
from buckeye.errors import StoreError, UsageError

_CODE = re.compile(r'"(BK-[A-Z-]+)"')
_CHECK = re.compile(r'(?:\b(?:name(?:, \w+)?|TASK_TOOLS) = |\bCheckResult\()"([^"]+)"')
_REPEATED = re.compile(r'check_tasks_repeatable\([^"]*"([^"]+)"')
_RENAMED = re.compile(r'"([a-z -]+)": "(\w+)",')


@pytest.fixture
def explain(monkeypatch, capsys):
    """Return a function that runs `buckeye explain ...`; it returns exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["buckeye", "explain", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def sources():
    """Return the text of each module of Buckeye, by its path."""
    root = Path(buckeye.__file__).parent
    return {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")
    }


def test_codes_in_the_source_and_sections_are_the_same(sources):
    used = {code for text in sources.values() for code in _CODE.findall(text)}
    assert {name for name in explanations() if name.startswith("BK-")} == used


def test_findings_in_the_source_and_sections_are_the_same(sources):
    names = {name for text in sources.values() for name in _finding_names(ast.parse(text))}
    names |= METRIC_FINDINGS.keys()
    renamed = _renamed(sources)
    checks = [text for path, text in sources.items() if path.startswith("evaluation/checks/")]
    names |= {name.replace(" ", "_") for text in checks for name in _CHECK.findall(text)}
    places = _REPEATED.findall(sources["evaluation/env_check.py"])  # of a name that is not a literal
    names |= {f"same_tasks_{place.replace(' ', '_')}" for place in places}
    assert len(places) == 2
    names -= {check.replace(" ", "_") for check in renamed}
    names |= set(renamed.values())
    assert {name for name in explanations() if not name.startswith("BK-")} == names


def test_sections_are_short_and_start_with_one_sentence():
    for name, text in explanations().items():
        first, *others = text.split("\n\n")
        assert re.fullmatch(r"[^\n]+\.", first), name
        assert not re.search(r"\. [A-Z]", first), name
        assert len(others) <= 4, name
        assert max(map(len, text.splitlines())) <= 110, name
        assert not re.search(r"^#", text, re.M), name


def _finding_names(tree):
    """Yield the names of findings: of `.finding(NAME)` and `.share_finding(NAME)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="finding"), args=[ast.IfExp(body=one, orelse=other), *_]):
                yield from (one.value, other.value)
            case ast.Call(
                func=ast.Attribute(attr="finding" | "share_finding"), args=[ast.Constant(value=name), *_]
            ):
                yield name


def _renamed(sources):
    """Return names of findings of `--try`, by the names of the checks of `env check` that they replace."""
    return dict(_RENAMED.findall(sources["analysis/diagnosis/active_tests.py"]))


def test_explain_prints_the_section_of_a_code(explain):
    code, out, _ = explain("bk-port-taken")
    assert code == 0
    assert out.startswith("BK-PORT-TAKEN\n")


def test_explain_prints_the_section_of_a_finding(explain):
    code, out, _ = explain("stale_weights")
    assert code == 0
    assert out.startswith("stale_weights\n")


def test_explain_without_a_code_lists_all(explain):
    code, out, _ = explain()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(explanations())


def test_explain_suggests_a_similar_code(explain):
    code, _, err = explain("BK-PORT-TAKN")
    assert code == 2
    assert "BK-PORT-TAKEN" in err
    assert "BK-CLI-ARGUMENT" in err


def test_the_fields_of_an_error_survive_pickling_and_a_prefix():
    error = UsageError("no such file", code="BK-FILE-NOT-FOUND", at="run.toml:3 (data)", hint="create it")
    copied = pickle.loads(pickle.dumps(error)).prefixed("row 7")
    assert (copied.code, copied.at, copied.hint) == ("BK-FILE-NOT-FOUND", "run.toml:3 (data)", "create it")
    assert str(copied) == "run.toml:3 (data): row 7: no such file. Create it"
    denied = pickle.loads(pickle.dumps(StoreError("no", denied=True)))
    assert (denied.denied, denied.code) == (True, "BK-STORE-DENIED")
