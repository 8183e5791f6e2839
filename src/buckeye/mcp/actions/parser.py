"""Parse the calls in a model's reply. The parser never raises, but returns problems that the model reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buckeye.config.problems import closest, did_you_mean
from buckeye.envs.call_arguments import read_arguments
from buckeye.mcp.actions.literals import MAX_DEPTH, LiteralError, read_call, shorten

if TYPE_CHECKING:
    from buckeye.mcp.config import ParserConfig

_OPEN, _CLOSE = "<tool>", "</tool>"
_THINK, _THOUGHT = "<think>", "</think>"
_MARK = re.compile(f"{_THINK}|{_OPEN}")
_BLANK = re.compile(r"\s*")
_MAX_TAGS = 64
_MAX_NAME_CHARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """One call in a reply, with the name and the arguments that the model wrote.

    `call_id` links a native tool call to its result.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParseProblem:
    """One problem of a reply, as text for the model.

    `position` is an index into the reply. A native tool call has a `call_id` and no position.
    """

    message: str
    position: int = 0
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """A parsed reply. `calls` are the calls to run, in order. `format_score` is from 0 to 1.

    `plain` is the text outside thoughts and calls. `is_answer` is True if the reply has text and no call, not
    even an invalid call. If the rollout accepts this text as an answer, the format score is `answer_score`.
    """

    plain: str = ""
    is_answer: bool = False
    answer_score: float = 1.0
    calls: tuple[ParsedCall, ...] = ()
    problems: tuple[ParseProblem, ...] = ()
    format_score: float = 0.0


@dataclass(frozen=True, slots=True)
class _Thought:
    """A `<think>` block from `start` to `end`, tags included."""

    start: int
    end: int
    text: str
    closed: bool = True


@dataclass(frozen=True, slots=True)
class _Tag:
    """A `<tool>` tag from `start` to `end`. It has a call, or an error message with its position.

    `filled` is True if the tag is closed and not empty.
    """

    start: int
    end: int
    call: ParsedCall | None = None
    message: str = ""
    position: int = 0
    filled: bool = True


def parse_reply(text: str, parser: ParserConfig, actions: Collection[str]) -> ParsedReply:
    """Parse a reply in the `xml` format. A call of an unknown action is a problem.

    The format score is (xml_weight * tags + action_weight * calls) / (xml_weight + action_weight). It is 0
    for a reply without a closed, non-empty tool tag. `tags` is 1. It is halved if the reply does not begin
    with the required thinking, and halved if the reply has text outside the tags. `calls` is the share of
    tool tags whose call is well-formed, known, and not dropped because of `several_calls`.
    """
    parts = _split_parts(text, actions)
    tags = [part for part in parts if isinstance(part, _Tag)]
    thoughts = [part for part in parts if isinstance(part, _Thought)]
    problems = [_locate_problem(text, tag.message, tag.position) for tag in tags if tag.call is None]
    unclosed = [thought.start for thought in thoughts if not thought.closed]
    problems += [_locate_problem(text, "<think> is not closed by </think>", start) for start in unclosed]
    if not tags:
        problems.append(_locate_problem(text, f"no call; write {_OPEN}name(...){_CLOSE}", len(text)))
    calls, surplus = _select_calls([tag.call for tag in tags], parser)
    if surplus:
        problems.append(_locate_problem(text, surplus, tags[1].start))
    share = len(calls) / len(tags) if tags else 0.0
    plain = _text_outside(text, parts)
    return ParsedReply(
        plain=plain,
        is_answer=bool(plain) and not tags,
        answer_score=1.0 if not parser.use_thinking or _thinks_first(parts) else 0.5,
        calls=calls,
        problems=tuple(sorted(problems, key=lambda problem: problem.position)),
        format_score=_weighted_score(parser, _score_tags(text, parts, parser), share),
    )


def parse_tool_calls(
    message: Mapping[str, Any], parser: ParserConfig, actions: Collection[str]
) -> ParsedReply:
    """Parse the native tool calls of an assistant message (the `tools` format).

    The format score is the share of calls that are well-formed, known, and not dropped because of
    `several_calls`. It is 0 without calls. Tags do not count, because this format does not use them.
    """
    raw = message.get("tool_calls") or ()
    text = str(message.get("content") or "")
    parsed = [_parse_native_call(call, actions) for call in raw]
    problems = [part for part in parsed if isinstance(part, ParseProblem)]
    calls, surplus = _select_calls(
        [part if isinstance(part, ParsedCall) else None for part in parsed], parser
    )
    if not raw:
        problems.append(ParseProblem(message="no tool was called"))
    problems += [
        ParseProblem(message=surplus, call_id=part.call_id)
        for part in parsed
        if surplus and isinstance(part, ParsedCall) and part not in calls
    ]
    return ParsedReply(
        plain=_text_outside(text, [part for part in _split_parts(text, ()) if isinstance(part, _Thought)]),
        is_answer=not raw,
        calls=calls,
        problems=tuple(problems),
        format_score=len(calls) / len(raw) if raw else 0.0,
    )


def _split_parts(text: str, actions: Collection[str]) -> list[_Thought | _Tag]:
    """Return the thoughts and calls in order. A `</think>` alone closes a thought that the prompt opened."""
    parts = list(_scan(text, 0, actions))
    end = text.find(_THOUGHT)
    opened = text.find(_THINK, 0, max(end, 0)) >= 0
    if end < 0 or opened or any(part.start < end < part.end for part in parts if _has_call(part)):
        return parts
    after = end + len(_THOUGHT)
    return [_Thought(0, after, text[:end].strip()), *_scan(text, after, actions)]


def _has_call(part: _Thought | _Tag) -> bool:
    """Return True for a tag with a valid call. A `</think>` inside this tag belongs to an argument."""
    return isinstance(part, _Tag) and part.call is not None


def _scan(text: str, position: int, actions: Collection[str]) -> Iterator[_Thought | _Tag]:
    tags = 0
    while (mark := _MARK.search(text, position)) is not None:
        if mark[0] == _THINK:
            end = text.find(_THOUGHT, mark.end())
            position = end + len(_THOUGHT) if end >= 0 else len(text)
            inner = text[mark.end() : end if end >= 0 else len(text)]
            yield _Thought(mark.start(), position, inner.strip(), closed=end >= 0)
            continue
        tags += 1
        if tags > _MAX_TAGS:
            message = f"more than {_MAX_TAGS} calls; this call and all later calls are ignored"
            yield _Tag(mark.start(), mark.end(), message=message, position=mark.start(), filled=False)
            return
        tag = _parse_tag(text, mark, actions)
        position = tag.end
        yield tag


def _parse_tag(text: str, mark: re.Match[str], actions: Collection[str]) -> _Tag:
    """Return the tool tag whose `<tool>` is at `mark`."""
    start = mark.start()
    try:
        call = read_call(text, mark.end())
        after = _skip_blank(text, call.end)
        if not text.startswith(_CLOSE, after):
            raise LiteralError(f"expected {_CLOSE} after the call", after)
    except LiteralError as error:
        return _parse_broken_tag(text, mark, error)
    end = after + len(_CLOSE)
    if call.name not in actions:
        return _Tag(
            start,
            end,
            message=_unknown_call_message(call.name, actions),
            position=_skip_blank(text, mark.end()),
        )
    return _Tag(start, end, call=ParsedCall(name=call.name, args=tuple(call.args), kwargs=call.kwargs))


def _parse_broken_tag(text: str, mark: re.Match[str], error: LiteralError) -> _Tag:
    start = mark.start()
    close = text.find(_CLOSE, mark.end())
    if close < 0:
        message = f"{_OPEN} is not closed by {_CLOSE}"
        return _Tag(start, len(text), message=message, position=start, filled=False)
    filled = bool(text[mark.end() : close].strip())
    message = str(error) if filled else "no call between the tags"
    return _Tag(start, close + len(_CLOSE), message=message, position=error.position, filled=filled)


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match is not None else position


def _unknown_call_message(name: str, actions: Collection[str]) -> str:
    near = did_you_mean(closest(name[:_MAX_NAME_CHARS], actions, count=1))
    return f"no action {shorten(name)}. Use one of: {', '.join(actions)}.{near}"


def _select_calls(
    calls: Sequence[ParsedCall | None], parser: ParserConfig
) -> tuple[tuple[ParsedCall, ...], str | None]:
    """Return the calls to run, and a message about dropped calls. In `calls`, None marks an invalid call."""
    if len(calls) > 1 and parser.several_calls == "error":
        return (), "only one call is allowed in a reply; none was run"
    kept = calls[:1] if parser.several_calls == "first" else calls
    surplus = "only the first call of a reply is run" if len(kept) < len(calls) else None
    return tuple(call for call in kept if call is not None), surplus


def _score_tags(text: str, parts: Sequence[_Thought | _Tag], parser: ParserConfig) -> float:
    """Return `tags` in the formula of `parse_reply`, from 0 to 1."""
    if not any(isinstance(part, _Tag) and part.filled for part in parts):
        return 0.0
    thinks = parser.use_thinking and _thinks_first(parts)
    shape = 1.0 if thinks or not parser.use_thinking else 0.5
    expected = [p for p in parts if isinstance(p, _Tag) or p.text == "" or (thinks and p is parts[0])]
    return shape / 2 if _text_outside(text, expected) else shape


def _thinks_first(parts: Sequence[_Thought | _Tag]) -> bool:
    """Return True if a reply begins with a closed, non-empty thought."""
    first = parts[0] if parts else None
    return isinstance(first, _Thought) and first.closed and first.text != ""


def _text_outside(text: str, parts: Sequence[_Thought | _Tag]) -> str:
    """Return the text before, between and after the parts."""
    starts = [part.start for part in parts]
    ends = [part.end for part in parts]
    between = (text[end:start].strip() for end, start in zip([0, *ends], [*starts, len(text)], strict=True))
    return "\n".join(filter(None, between))


def _weighted_score(parser: ParserConfig, shape: float, share: float) -> float:
    if shape == 0.0:
        return 0.0
    total = parser.xml_weight + parser.action_weight
    return (parser.xml_weight * shape + parser.action_weight * share) / total


def _locate_problem(text: str, message: str, position: int) -> ParseProblem:
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    return ParseProblem(message=f"line {line}, column {column}: {message}", position=position)


def _parse_native_call(call: Mapping[str, Any], actions: Collection[str]) -> ParsedCall | ParseProblem:
    function = call.get("function") or {}
    name, raw, call_id = function.get("name") or "", function.get("arguments"), call.get("id")
    if not name:
        return ParseProblem(message=f"the call cannot be read: {shorten(str(raw))}", call_id=call_id)
    if name not in actions:
        return ParseProblem(message=_unknown_call_message(name, actions), call_id=call_id)
    try:
        arguments = read_arguments(raw)
        _check_depth(arguments)
    except ValueError as error:
        return ParseProblem(message=f"the arguments of {name} {error}", call_id=call_id)
    return ParsedCall(name=name, kwargs=arguments, call_id=call_id)


def _check_depth(arguments: Any) -> None:
    """Raise ValueError for deep nesting, because the MCP SDK and transforms process arguments recursively."""
    level = [arguments] if isinstance(arguments, Mapping | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [item for items in inner for item in items if isinstance(item, Mapping | list)]
        if not level:
            return
    raise ValueError("are not valid JSON: nested too deeply")
