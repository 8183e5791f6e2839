"""Damage to a file: in its bytes, in its text, and in the values that it holds."""

import copy
import json
import tomllib

import yaml
from hypothesis import strategies as st

WORDS = (
    *("", "x", "a" * 300, "\u0416\u4e2d\U0001f600", "\x00", "\x1b[31m", "../../etc/passwd", "${HOME}"),
    *("$(id)", "{{ 1/0 }}", "None"),
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**9, 10**18, 10**400, 0.5, -0.0, 1e308, True, False)
DEEP = 2000
JUNK = st.one_of(
    st.none(),
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.sampled_from(([], {}, [[]], [None], {"type": "x"}, {"": ""}, [1, "a", {}], ["a"] * 50)),
    st.text(max_size=6),
)
SIGNS = (*"{}[]\"':,=#\n\t\\-", "&a", "*a", "!!x", "%}", "{{", "\u2028", "\x00", "\ufeff", "\\ud800")
BYTES = (b"\x00", b"\xff", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\r", b"\x80" * 9, b"PK\x03\x04")


@st.composite
def spoilt(draw, seed: bytes, kind: str) -> bytes:
    """Draw a damaged version of `seed`.

    `kind` is the content: "json", "lines" of JSON, "yaml", "toml", "text", "binary", or "safetensors".

    A "safetensors" file has a JSON header after its length.
    """
    values = kind in ("json", "yaml", "toml", "lines", "safetensors") and draw(st.booleans())
    if values:
        return draw(_other_values(seed, kind))
    if kind in ("binary", "safetensors") or draw(st.integers(0, 4)) == 0:
        return draw(_other_bytes(seed))
    return draw(_other_text(seed.decode()))


@st.composite
def _other_bytes(draw, content):
    at = draw(st.integers(0, len(content)))
    how = draw(st.integers(0, 3))
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + draw(st.sampled_from(BYTES)) + content[at:]
    if how == 2:
        return content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 8)) :]
    return content[at:] + content[:at]


@st.composite
def _other_text(draw, text):
    at = draw(st.integers(0, len(text)))
    how = draw(st.integers(0, 5))
    if how == 0:
        changed = text[:at]
    elif how == 1:
        changed = text[:at] + draw(st.sampled_from(SIGNS)) + text[at:]
    elif how == 2:
        changed = text[:at] + text[at + draw(st.integers(1, 5)) :]
    elif how == 3:
        changed = text[:at] + draw(st.sampled_from(SIGNS[:4])) * DEEP + text[at:]
    else:
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        other = draw(st.integers(0, len(lines) - 1))
        lines[line : line + 1] = [lines[line], lines[other]] if how == 4 else []
        changed = "\n".join(lines)
    return changed.encode("utf-8", "surrogatepass")


@st.composite
def _other_values(draw, content, kind):
    if kind == "lines":
        lines = content.splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(_other_values(lines[at], "json"))
        return b"\n".join(lines) + b"\n"
    if kind == "safetensors":
        size = int.from_bytes(content[:8], "little")
        header = draw(_other_values(content[8 : 8 + size], "json"))
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    value = {"json": json.loads, "yaml": yaml.safe_load, "toml": lambda data: tomllib.loads(data.decode())}[
        kind
    ](content)
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_other_value(value))
    # JSON is also YAML, and an inline table in TOML
    written = json.dumps(value, ensure_ascii=draw(st.booleans()), default=str)
    if kind == "toml" and isinstance(value, dict):
        written = "\n".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items())
    return written.encode("utf-8", "surrogatepass")


@st.composite
def _other_value(draw, root):
    """Draw the value with one place replaced, removed, renamed or moved."""
    root = copy.deepcopy(root)
    places = list(_places(root))
    if not places:
        return draw(JUNK)
    holder, key = places[draw(st.integers(0, len(places) - 1))]
    how = draw(st.integers(0, 6))
    if how <= 2:
        holder[key] = draw(JUNK)
    elif how == 3:
        del holder[key]
    elif how == 4 and isinstance(holder, dict):
        name = draw(st.sampled_from((str(key) + "s", str(key).replace("_", "-"), str(key).upper(), *WORDS)))
        holder[name] = holder.pop(key)
    elif how == 5:
        other, there = places[draw(st.integers(0, len(places) - 1))]
        if there in other if isinstance(other, dict) else there < len(other):
            holder[key] = copy.deepcopy(other[there])
    else:
        holder[key] = [holder[key]] if draw(st.booleans()) else {"type": holder[key]}
    return root


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _toml(value):
    if value is None:
        return '"None"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, default=str)
