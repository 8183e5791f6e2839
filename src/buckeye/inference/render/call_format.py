"""Formats in which models write tool calls. The chat template of a model shows which one it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from buckeye.envs.base import Tool
from buckeye.inference.render.parse_reply import ParsedCall, ParsedMessage, make_call
from buckeye.mcp.actions import literals

Form = Literal["json", "xml", "python", "named"]
NAME, KEY, VALUE = "probe", "key", "probe-value"
"""Tool, argument and value of the call that a template writes to show its format."""

_PYTHON_TAG = "<|python_tag|>"
_OPEN = r"(?P<open><(?!/)[^<>\s]*(?i:call|tool|action)[^<>\s]*>|\[TOOL_CALLS\])\s*"
_CLOSE = r"\s*(?P<close></?[^<>\s]+>)"
_PARTS: Mapping[Form, tuple[str, str, str]] = {
    "xml": (r"<function=", rf">\s*<parameter={KEY}>\s*", r"\s*</parameter>\s*</function>"),
    "python": (r"\[\s*", rf"\(\s*{KEY}\s*=\s*['\"]?", r"['\"]?,?\s*\)\s*\]"),
    "named": ("", rf"(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*\{{\s*\"{KEY}\":\s*\"", r"\"\s*\}"),
    "json": (
        r"(?:\[\s*)?\{[^{}\[\]]*\"(?:tool_)?name\":\s*\"",
        rf"\",\s*\"(?:arguments|parameters)\":\s*\{{\s*\"{KEY}\":\s*\"",
        r"\"\s*\}[^{}]*\}\s*\]?",
    ),
}
"""Patterns of the text before the name of a tool, before the value of its argument, and after the value."""
_REST = re.compile(r">|\(|\[ARGS\]|\",\s*\"\w+\":")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_NAMED = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Format of tool calls: their `form`, between the markers `open` and `close`.

    Without `open`, a reply that is a call and nothing else is a call. `lead` is the text from `open` to the
    name of a tool, and `rest` the text between the name and the arguments.

    Forms: "json" has an object with name and arguments, or a list of them; "xml" has
    `<function=NAME><parameter=KEY>VALUE</parameter></function>`; "python" has `[NAME(KEY=VALUE)]`; "named"
    has `NAME[ARGS]{"KEY": VALUE}`.
    """

    form: Form
    open: str
    close: str
    lead: str
    rest: str

    def start(self, name: str | None) -> str:
        """Return the start of a call of the tool `name`, or of any tool if it is None."""
        if name is None:
            return self.lead
        return (
            self.lead
            + (json.dumps(name, ensure_ascii=False)[1:-1] if self.form == "json" else name)
            + self.rest
        )

    def may_start(self, text: str) -> bool:
        """Return True if `text`, without white space before it, may start a reply that is only a call."""
        return not text or text.startswith("[" if self.form == "python" else "{")

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedMessage:
        """Split a reply into content and calls. A call that cannot be read is in a marker only."""
        if not self.open:
            calls = tuple(self._read(text.strip().removeprefix(_PYTHON_TAG), tools))
            is_call = bool(calls) and all(call.name for call in calls)
            return ParsedMessage(content="", calls=calls) if is_call else ParsedMessage(content=text)
        start, end = re.escape(self.open), f"{re.escape(self.close)}|" if self.close else ""
        block = re.compile(rf"{start}(.*?)(?:{end}(?={start})|\Z)", re.DOTALL)
        whole = self.form == "xml"
        calls = tuple(c for m in block.finditer(text) for c in self._read(m[0] if whole else m[1], tools))
        return ParsedMessage(content=block.sub("", text).strip() if calls else text, calls=calls)

    def _read(self, text: str, tools: Sequence[Tool]) -> Iterator[ParsedCall]:
        match self.form:
            case "json":
                yield from _read_json(text)
            case "xml":
                yield from _read_xml(text, tools)
            case "python":
                yield from _read_python(text)
            case "named":
                match = _NAMED.fullmatch(text)
                name, arguments = (match[1], _loads(match[2])) if match is not None else (None, None)
                yield make_call(name if isinstance(arguments, dict) else None, arguments, raw=text)


TAGGED = CallFormat(
    form="json",
    open="<tool_call>",
    close="</tool_call>",
    lead='<tool_call>\n{"name": "',
    rest='", "arguments":',
)
"""Format for templates that do not show one."""


def find_call_format(turn: str, turn_end: str) -> CallFormat:
    """Return the format of the call in `turn`, the text that a template writes for a reply with one call.

    The call has the name `NAME` and an argument `KEY` with the value `VALUE`. `turn_end` ends a reply. For
    other forms of a call, return `TAGGED`.
    """
    for form, (before, between, after) in _PARTS.items():
        pattern = rf"(?P<lead>(?:{_OPEN})?{before}){NAME}(?P<between>{between}){VALUE}{after}(?:{_CLOSE})?"
        match = re.search(pattern, turn)
        if match is None:
            continue
        opened, rest = match["open"] or "", _REST.search(match["between"])
        if form == "xml" and not opened:
            opened, close = before, "</function>"
        else:
            close = "" if not opened or (match["close"] or "") in turn_end else match["close"]
        text_before = turn[: match.start()].rstrip()
        if rest is not None and (opened or not text_before or text_before.endswith(">")):
            return CallFormat(form=form, open=opened, close=close, lead=match["lead"], rest=rest[0])
    return TAGGED


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_json(text: str) -> Iterator[ParsedCall]:
    value = _loads(text)
    is_list = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    for item in value if is_list else [value]:
        fields = item if isinstance(item, dict) else {}
        arguments = fields.get("arguments", fields.get("parameters", {}))
        raw = text if item is value else json.dumps(item, ensure_ascii=False)
        yield make_call(fields.get("name", fields.get("tool_name")), arguments, raw=raw)


def _read_xml(text: str, tools: Sequence[Tool]) -> Iterator[ParsedCall]:
    functions = [*_FUNCTION.finditer(text)]
    if not functions:
        yield make_call(None, None, raw=text)
    for function in functions:
        types = _types(function[1], tools)
        found = _PARAMETER.finditer(function[2])
        values = {match[1]: _typed(match[2], types.get(match[1])) for match in found}
        yield make_call(function[1], values, raw=function[0])


def _types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the type of each parameter of the tool `name`."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(text: str, kind: Any) -> Any:
    """Return a value that is written without quotation marks: text, unless its type differs."""
    if kind is None or kind == "string":
        return text
    words = {"True": True, "False": False, "None": None}  # templates write values as Python does
    stripped = text.strip()
    value = words[stripped] if stripped in words else _loads(stripped)
    return text if value is None and stripped not in ("None", "null") else value


def _read_python(text: str) -> Iterator[ParsedCall]:
    try:
        calls = [*_python_calls(text.strip())]
    except literals.LiteralError:
        calls = []
    if not calls:
        yield make_call(None, None, raw=text)
    for call in calls:
        yield make_call(None if call.args else call.name, call.kwargs, raw=text)


def _python_calls(text: str) -> Iterator[literals.CallText]:
    position, end = 1, len(text) - 1
    if not text.startswith("["):
        raise literals.LiteralError("expected a list", 0)
    while True:
        call = literals.read_call(text, position)
        yield call
        following = text[call.end :].lstrip()
        position = len(text) - len(following) + 1
        if following == "]" and position - 1 == end:
            return
        if not following.startswith(","):
            raise literals.LiteralError("expected , or ]", call.end)
