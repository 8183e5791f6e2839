"""Error codes: each one that the source uses has an explanation, and `buckeye explain` prints it."""

import pickle
import re
import sys
from pathlib import Path

import pytest

import buckeye
from buckeye.cli.explain import explanations
from buckeye.cli.main import main
from buckeye.errors import StoreError, UsageError

_CODE = re.compile(r'"(BK-[A-Z-]+)"')


@pytest.fixture
def explain(monkeypatch, capsys):
    """Return a function that runs `buckeye explain ...`; it returns exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["buckeye", "explain", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code, *capsys.readouterr())

    return run


def test_every_code_in_the_source_has_an_explanation():
    files = Path(buckeye.__file__).parent.rglob("*.py")
    used = {code for file in files for code in _CODE.findall(file.read_text(encoding="utf-8"))}
    assert used - explanations().keys() == set()


def test_explain_prints_the_section_of_a_code(explain):
    code, out, _ = explain("bk-port-taken")
    assert code == 0
    assert out.startswith("BK-PORT-TAKEN\n")


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
