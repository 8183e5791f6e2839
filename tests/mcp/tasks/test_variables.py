"""Variables in tasks, and the file that may define them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.dotenv import read_dotenv
from buckeye.base.keys import variables
from buckeye.errors import UsageError
from buckeye.mcp.tasks.variables import resolve_variables

ENVIRONMENT = {"BUCKEYE_API_KEY": "s3cret", "A": "1", "EMPTY": "", "lower": "l"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bearer $BUCKEYE_API_KEY", "Bearer s3cret"),
        ("Bearer $buckeye_API_KEY", "Bearer s3cret"),
        ("${buckeye_api_key}", "s3cret"),
        ("$lower", "l"),
        ("${A}${A}x$A.", "11x1."),
        ("${MISSING:-default}", "default"),
        ("${MISSING:-}", ""),
        ("${MISSING:-a b:-c}", "a b:-c"),
        ("${A:-default}", "1"),
        ("[$EMPTY]", "[]"),
        ("$$A $$$A $$", "$A $1 $"),
        ("cost $5, a $ and $", "cost $5, a $ and $"),
        ("", ""),
    ],
)
def test_resolve_variables_in_texts(text, expected):
    assert resolve_variables(text, ENVIRONMENT) == expected


def test_resolve_variables_in_values_but_not_in_keys():
    value = {"$A": ["$A", 5, None, {"x": "${A}"}], "n": 1.5, "t": True}
    assert resolve_variables(value, ENVIRONMENT) == {"$A": ["1", 5, None, {"x": "1"}], "n": 1.5, "t": True}


def test_unset_variables_are_reported_with_their_keys(refusal):
    value = {"headers": {"Authorization": "Bearer $NO_KEY", "X": "${NO_X} $NO_KEY"}, "args": ["$NO_Y"]}
    with refusal(UsageError):
        resolve_variables(value, ENVIRONMENT)


@pytest.mark.parametrize("text", ["${A", "${}", "${A:default}", "${A-b}", "${5}", "${A:-${B}}"])
def test_invalid_braces_are_refused(text, refusal):
    with refusal(UsageError):
        resolve_variables(text, ENVIRONMENT)


@given(st.text(), st.text())
def test_dollars_can_be_escaped_and_values_are_resolved_only_once(text, value):
    assert resolve_variables(text.replace("$", "$$"), {}) == text
    assert resolve_variables("<$X>", {"X": value}) == f"<{value}>"


def test_a_dotenv_file(tmp_path, monkeypatch):
    path = tmp_path / ".env"
    path.write_text(
        "# keys\n\nBUCKEYE_API_KEY=your-key\nexport W=w x # comment\nQ='a # $b'\n"
        'D="line\\n\\"two\\""\nE=\nF=a#b\n  G = g \n'
    )
    assert read_dotenv(path) == {
        "BUCKEYE_API_KEY": "your-key",
        "W": "w x",
        "Q": "a # $b",
        "D": 'line\n"two"',
        "E": "",
        "F": "a#b",
        "G": "g",
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("E", "from outside")
    merged = variables()
    assert (merged["E"], merged["W"]) == ("from outside", "w x")
    assert read_dotenv(tmp_path / "none") == {}


@pytest.mark.parametrize("line", ["secret-value", "A='open", "5=x", "=x"])
def test_a_bad_line_is_named_without_its_content(tmp_path, line, refusal):
    path = tmp_path / ".env"
    path.write_text(f"A=1\n{line}\n")
    with refusal(UsageError):
        read_dotenv(path)
