"""`tools/prose.py`: banned constructions are found with file, line and replacement, and others are not."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose_tool", ROOT / "tools" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "line", "found"),
    [
        ('"""Whether it is ready."""', 1, "Whether"),
        ('"""Return 1."""\n\n\ndef f():\n    """Return it.\n\n    The run goes on.\n    """\n', 7, "goes on"),
        ("x = 1  # nobody reads this\n", 1, "nobody"),
        ('raise ValueError("there is no file here")\n', 1, "is no"),
        ('print(f"the run goes on with {1} of them")\n', 1, "goes on"),
    ],
    ids=["headless docstring", "line in a docstring", "comment", "message", "f-string"],
)
def test_python_text_with_a_banned_construction_is_found_with_its_line(prose, tmp_path, source, line, found):
    path = tmp_path / "a.py"
    path.write_text(source)
    (problem,) = prose.check_files([path])
    assert problem.startswith(f"{path}:{line}: {found} -> ")


@pytest.mark.parametrize(
    "source",
    [
        '"""Return True if the value is None."""\nready = value is not None\n',
        'KEYS = ("go on", "beside")\n',  # not a sentence
        '"""Return the text `what is no number`."""\n'.replace("`what is no number`", "of a number"),
    ],
    ids=["None", "single words", "clean"],
)
def test_python_text_without_banned_constructions_passes(prose, tmp_path, source):
    path = tmp_path / "a.py"
    path.write_text(source)
    assert prose.check_files([path]) == []


def test_code_of_a_page_is_not_checked(prose, tmp_path):
    path = tmp_path / "a.md"
    path.write_text("# Title\n\nRun `rl goes on`.\n\n```\nthe run goes on\n```\n\nThe run goes on.\n")
    (problem,) = prose.check_files([path])
    assert problem.startswith(f"{path}:9: goes on -> ")


@pytest.mark.parametrize(
    ("subject", "count"),
    [
        ("trainer: skip groups with equal rewards", 0),
        ("Merge branch 'a'", 0),
        ("skip groups", 1),
        (f"trainer: {'x' * 60}", 1),
        ("trainer: let the run go on", 1),
    ],
)
def test_commit_subject_has_an_area_a_length_and_plain_words(prose, subject, count):
    assert len(list(prose.subject_problems(subject))) == count


def test_allowed_texts_are_few(prose):
    assert len(prose._allowed()) <= 20
