import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.lines import json_lines, toml_lines
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

LINES = {
    ("top",): 2,
    ("quoted key",): 3,
    ("dotted",): 4,
    ("dotted", "in side", "leaf"): 4,
    ("dotted", "in side", "leaf", 0): 5,
    ("dotted", "in side", "leaf", 1): 6,
    ("dotted", "in side", "leaf", 1, "y"): 6,
    ("dotted", "in side", "leaf", 1, "y", 0): 7,
    ("table",): 10,
    ("table", "text"): 11,
    ("table", "literal"): 15,
    ("table", "after"): 18,
    ("table", "inner", "a.b"): 19,
    ("table", "inner", "a.b", "z"): 20,
    ("list",): 21,
    ("list", 0, "a"): 22,
    ("list", 0, "nested", 0, "b"): 24,
    ("list", 0, "nested", 1): 25,
    ("list", 0, "nested", 1, "b"): 26,
    ("list", 0, "sub", "c"): 28,
    ("list", 1): 29,
    ("list", 1, "a", "b", "d"): 30,
    ("list", 1, "nested", 0, "b"): 32,
}


def test_lines_of_toml():
    lines = toml_lines(TOML)
    assert {path: lines.get(path) for path in LINES} == LINES


def test_lines_of_json():
    text = json.dumps({"a": [{"b": 'x"}'}, 2], "c": {"d": None}}, indent=1)
    lines = json_lines(text)
    rows = text.split("\n")
    assert {path: rows[line - 1].strip(" ,") for path, line in lines.items()} == {
        (): "{",
        ("a",): '"a": [',
        ("a", 0): "{",
        ("a", 0, "b"): '"b": "x\\"}"',
        ("a", 1): "2",
        ("c",): '"c": {',
        ("c", "d"): '"d": null',
    }


values = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
tables = st.dictionaries(st.text(max_size=4), values, max_size=4)


@given(tables)
def test_every_value_of_json_has_its_line(document):
    text = json.dumps(document, indent=1)
    lines, rows = json_lines(text), text.split("\n")
    for path, value in _leaves((), document):
        assert json.dumps(value) in rows[lines[path] - 1]


@given(tables)
def test_every_value_of_toml_has_its_line(document):
    text = "".join(f"\n# note\n{_key(key)} = {_toml(value)}" for key, value in document.items())
    lines, rows = toml_lines(text), text.split("\n")
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
    """A value as TOML, each item of a list and each pair of a table on a line or in a row."""
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


def test_json_files(load, folder, refused):
    folder.write("t.json", '{"ckpt": null,\n "optim": {"lr": 1.5}}')
    assert load(TrainerConfig, "@ t.json").optim.lr == 1.5
    folder.write("bad.json", '{"optim":\n {"lrr": 1.5}}')
    assert refused(TrainerConfig, "@ bad.json") == "bad.json:2: optim.lrr: no such setting. Did you mean lr?"
    folder.write("twice.json", '{"seed": 1, "seed": 2}')
    assert refused(TrainerConfig, "@ twice.json") == "twice.json: the key 'seed' is there twice."


def test_byte_order_mark_and_windows_line_ends(load, folder):
    (folder.path / "t.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n\r\n[optim]\r\nlr = 2.0\r\n")
    assert load(TrainerConfig, "@ t.toml").optim.lr == 2.0


@pytest.mark.parametrize(
    ("line", "corrected"),
    [
        ("name = Qwen/Qwen3-0.6B", 'name = "Qwen/Qwen3-0.6B"'),
        ("name = Qwen/Qwen3-0.6B  # the model", 'name = "Qwen/Qwen3-0.6B"  # the model'),
        ("name = 0.6B", 'name = "0.6B"'),
        ('name = "abc', 'name = "abc"'),
        ("name = “abc”", 'name = "abc"'),
        ('name = "C:\\path\\q"', "name = 'C:\\path\\q'"),
        ("name = outputs\\run", "name = 'outputs\\run'"),
        ("clean = True", "clean = true"),
        ("max_steps = None", 'max_steps = "None"'),
        ("ids = [0, 1", "ids = [0, 1]"),
        ("args = {a = 1", "args = {a = 1}"),
    ],
)
def test_corrected_lines(refused, folder, line, corrected):
    folder.write("f.toml", f"first = 1\n{line}\n")
    message = refused(TrainerConfig, "@ f.toml")
    assert message.startswith("f.toml:2:")
    assert f"    {line}\n" in message
    assert message.endswith(f"Write:\n    {corrected}")


@pytest.mark.parametrize("line", ["lr = .5", "steps = 1,000", "seed = 007", "ids = 0,1", "[model"])
def test_no_quotes_are_offered_for_numbers(refused, folder, line):
    folder.write("f.toml", f"first = 1\n{line}\n")
    message = refused(TrainerConfig, "@ f.toml")
    assert message.startswith("f.toml:2:")
    assert message.endswith("^")


@pytest.mark.parametrize("text", ["seed = 1\nlr = 2\nseed = 3\n", "[seed]\nx = 1\n[seed]\n"])
def test_set_twice(refused, folder, text):
    folder.write("f.toml", text)
    message = refused(TrainerConfig, "@ f.toml")
    assert message.startswith("f.toml:3:")
