import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.line_numbers import json_line_numbers, toml_line_numbers
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.trainer import TrainerConfig

TOML = '''\
# a comment with [brackets] and = signs
top = 1
"quoted key" = "a # b"
dotted . "in side".leaf = [
  1,  # one ]
  { x = 1, y = [
    2] },
]

[table]   # comment
text = """
[not.a.header]
key = 1
"""
literal = \'\'\'
x = """
\'\'\'
after = 'it''s' # = [
[table.inner."a.b"]
z = 1979-05-27 07:32:00
[[list]]
a = 1
[[list.nested]]
b = 1
[[list.nested]]
b = 2
[list.sub]
c = 1
[[list]]
a.b = {c = 1, d = 2}
[[list.nested]]
b = 3
'''.replace("'it''s'", "'its'")

JSON = json.dumps({"a": [{"b": 'x"}'}, 2], "c": {"d": None}}, indent=1)


@pytest.mark.parametrize(
    ("read", "text"), [(toml_line_numbers, TOML), (json_line_numbers, JSON)], ids=["toml", "json"]
)
def test_line_numbers_of_values(read, text, wording):
    rows = text.split("\n")
    assert {".".join(map(str, path)): rows[line - 1] for path, line in read(text).items()} == wording


values = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
tables = st.dictionaries(st.text(max_size=4), values, max_size=4)


@given(tables)
def test_every_value_of_json_has_its_line(document):
    text = json.dumps(document, indent=1)
    lines, rows = json_line_numbers(text), text.split("\n")
    for path, value in _leaves((), document):
        assert json.dumps(value) in rows[lines[path] - 1]


@given(tables)
def test_every_value_of_toml_has_its_line(document):
    text = "".join(f"\n# note\n{_key(key)} = {_toml(value)}" for key, value in document.items())
    lines, rows = toml_line_numbers(text), text.split("\n")
    for path, value in _leaves((), document):
        assert _toml(value) in rows[lines[path] - 1]


def _leaves(path, value):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def _key(text):
    return '"' + "".join(f"\\U{ord(c):08X}" for c in text) + '"'


def _toml(value):
    """Return a value as TOML, with list items on separate lines and tables on one line."""
    if isinstance(value, list):
        return "[" + "".join(f"\n {_toml(item)} , # ] }}" for item in value) + "\n]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return _key(value) if isinstance(value, str) else json.dumps(value)


def test_none_as_text(load, folder):
    folder.write("o.toml", 'max_steps = "None"\nadvantage = "None"\n[[env]]\nid = "a"\nargs = {x = "None"}\n')
    config = load(OrchestratorConfig, "@ o.toml")
    assert config.max_steps is None
    assert config.advantage is None
    assert config.env[0].args == {"x": "None"}


def test_json_files(load, folder, refused, wording):
    folder.write("t.json", '{"ckpt": null,\n "optim": {"lr": 1.5}}')
    assert load(TrainerConfig, "@ t.json").optim.lr == 1.5
    folder.write("bad.json", '{"optim":\n {"lrr": 1.5}}')
    assert refused(TrainerConfig, "@ bad.json") == wording
    folder.write("twice.json", '{"seed": 1, "seed": 2}')
    assert refused(TrainerConfig, "@ twice.json") == wording


def test_byte_order_mark_and_windows_line_ends(load, folder):
    (folder.path / "t.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n\r\n[optim]\r\nlr = 2.0\r\n")
    assert load(TrainerConfig, "@ t.toml").optim.lr == 2.0


LINES_TO_CORRECT = [
    "name = Qwen/Qwen3-0.6B",
    "name = Qwen/Qwen3-0.6B  # the model",
    "name = 0.6B",
    'name = "abc',
    "name = “abc”",
    'name = "C:\\path\\q"',
    "name = outputs\\run",
    "clean = True",
    "max_steps = None",
    "ids = [0, 1",
    "args = {a = 1",
    *("lr = .5", "steps = 1,000", "seed = 007", "ids = 0,1", "[model"),  # no quotes are suggested for these
]


@pytest.mark.parametrize("line", LINES_TO_CORRECT)
def test_invalid_toml_gets_a_corrected_line(refused, folder, line, wording):
    folder.write("f.toml", f"first = 1\n{line}\n")
    assert refused(TrainerConfig, "@ f.toml") == wording


@pytest.mark.parametrize("text", ["seed = 1\nlr = 2\nseed = 3\n", "[seed]\nx = 1\n[seed]\n"])
def test_duplicate_keys_are_refused(refused, folder, text, wording):
    folder.write("f.toml", text)
    assert refused(TrainerConfig, "@ f.toml") == wording
