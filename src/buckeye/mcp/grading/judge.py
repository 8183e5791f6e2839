"""Judge texts, JSON values and calls of a model.

The values are untrusted, so only the worker process calls these functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from buckeye.base.columns import counted
from buckeye.mcp.grading.schema import CallsGrader, ExpectedCall, Match, ResultGrader, last_number

_REGEX_SECONDS = 2.0
_MAX_SHOWN_CHARS = 80
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_ABSENT = object()


class GraderVerdict(NamedTuple):
    """Score of a grader from 0 to 1, and an explanation for people."""

    score: float
    explanation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """Call of the model, and its result as text and, if any, as structured content (`data`)."""

    tool: str
    arguments: Mapping[str, Any]
    text: str = ""
    data: Any = None
    error: bool = False


def judge_text(match: Match, text: str, data: Any = None) -> GraderVerdict:
    """Return the verdict of the test `match` on a text. `data` is the text's JSON value, if known."""
    value: Any = _ABSENT if data is None else data
    if match.json_path is not None:
        if value is _ABSENT and (value := _json(text)) is _ABSENT:
            return GraderVerdict(0.0, f"expected JSON, found {format_short(text)}")
        values = _select(match.json_path, value)
        if not values:
            return GraderVerdict(0.0, f"no value at {match.json_path}")
        value = values[0] if len(values) == 1 else values
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not match.tests:
            return GraderVerdict(1.0, f"{match.json_path} is {format_short(value)}")
    passed, expected = _run_test(match, text, value)
    found = f"found {format_short(text if value is _ABSENT else value)}"
    return GraderVerdict(float(passed), found if passed else f"{expected}, {found}")


def judge_schema(schema: Any, text: str) -> GraderVerdict:
    """Return a score of 1 if the text is JSON that the JSON Schema accepts, or 0."""
    import jsonschema

    value = _json(text)
    if value is _ABSENT:
        return GraderVerdict(0.0, f"expected JSON, found {format_short(text)}")
    validator = jsonschema.validators.validator_for(schema)(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        return GraderVerdict(1.0, "the text matches the schema")
    return GraderVerdict(0.0, f"{error.json_path}: {error.message[:200]}")


def _run_test(match: Match, text: str, value: Any) -> tuple[bool, str]:
    """Return True if the test of `match` passes, and the expected value as text."""
    (test,) = match.tests
    fold = str.casefold if match.ignore_case else str
    if test == "exact":
        return _is_exact(match.exact, text, value, fold), f"expected {format_short(match.exact)}"
    if test == "contains":
        wanted = str(match.contains)
        return fold(wanted) in fold(text), f"expected text with {format_short(wanted)}"
    if test == "regex":
        import regex  # only installed with an extra, so do not import it with this module

        try:
            hit = regex.search(str(match.regex), text, timeout=_REGEX_SECONDS)
        except TimeoutError:
            return False, f"the pattern timed out after {_REGEX_SECONDS:g} s"
        return hit is not None, f"expected a match of {format_short(match.regex)}"
    if test == "number":
        return _is_number(match, text, value)
    if test == "set":
        assert isinstance(match.set, list)
        return _is_set(match.set, text, value)
    return _is_math(str(match.math), text), f"expected a value equal to {format_short(match.math)}"


def _is_exact(expected: Any, text: str, value: Any, fold: Any) -> bool:
    if isinstance(expected, str):
        return bool(fold(text.strip()) == fold(expected.strip()))
    return json_equal(expected, _json(text) if value is _ABSENT else value)


def _is_number(match: Match, text: str, value: Any) -> tuple[bool, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else last_number(text)
    assert isinstance(match.number, float)
    within = f" within {match.tolerance:g}" if "tolerance" in match.model_fields_set else ""
    expected = f"expected the number {match.number:.15g}{within}"
    if number is None:
        return False, expected
    is_within = abs(number - match.number) <= max(match.tolerance, 1e-9 * abs(match.number))
    return is_within, f"{expected}, not {number:.15g}"


def _is_set(expected: Sequence[Any], text: str, value: Any) -> tuple[bool, str]:
    items = _json(text) if value is _ABSENT else value
    if not isinstance(items, list):
        items = [part.strip(" \t\r-*•") for part in re.split(r"[,;\n]", text)]
        expected = [item if isinstance(item, str) else json.dumps(item) for item in expected]
    items = [item for item in items if item != ""]
    found, wanted = ({_key(item): item for item in side} for side in (items, expected))
    missing = [format_short(wanted[key]) for key in wanted if key not in found]
    surplus = [format_short(found[key]) for key in found if key not in wanted]
    sides = (("missing", missing), ("not expected", surplus))
    parts = [f"{label}: {', '.join(shown[:5])}" for label, shown in sides if shown]
    return not parts, "; ".join(parts)


def _key(item: Any) -> str:
    """Return a text that is equal for equal items. 1 equals 1.0, but 1 does not equal true."""
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    return json.dumps(item.strip() if isinstance(item, str) else item, sort_keys=True)


def _is_math(expected: str, text: str) -> bool:
    from math_verify import parse, verify

    def parse_math(text: str) -> Any:
        return parse(text, parsing_timeout=None)  # `judge_in_worker` limits the time

    def is_bare(text: str) -> bool:
        return not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))

    wanted = parse_math(f"${expected}$" if is_bare(expected) else expected)
    found = parse_math(f"${text}$" if "\\" in text and is_bare(text) else text)
    return bool(verify(wanted, found, timeout_seconds=None))


def judge_calls(grader: CallsGrader, calls: Sequence[RecordedCall]) -> GraderVerdict:
    """Return the verdict on the calls that the model made."""
    if grader.in_order is not None:
        done = 0
        for call in calls:
            if done < len(grader.in_order) and not call.error and _is_call(grader.in_order[done], call):
                done += 1
        if done < len(grader.in_order):
            missing = _describe_call(grader.in_order[done])
            return GraderVerdict(
                0.0, f"found {done} of {counted(len(grader.in_order), 'call')} in order; missing: {missing}"
            )
    matching = [call for call in calls if grader.call is None or _is_call(grader.call, call)]
    of_call = "" if grader.call is None else f" of {_describe_call(grader.call)}"
    if grader.at_most is not None and len(matching) > grader.at_most:
        limit = counted(grader.at_most, "call")
        return GraderVerdict(0.0, f"expected at most {limit}{of_call}, found {len(matching)}")
    succeeded = [call for call in matching if not call.error]
    least = grader.at_least or (1 if grader.tool is not None and grader.at_most is None else 0)
    if len(succeeded) < least:
        failed = len(matching) - len(succeeded)
        found = f"{len(succeeded)} ({failed} more failed)" if failed else f"{len(succeeded)}"
        return GraderVerdict(0.0, f"expected {counted(least, 'call')}{of_call}, found {found}")
    return GraderVerdict(1.0, f"found {counted(len(matching), 'call')}{of_call}")


def _is_call(expected: ExpectedCall, call: RecordedCall) -> bool:
    if call.tool != expected.tool or any(
        name not in call.arguments or not json_equal(value, call.arguments[name])
        for name, value in expected.arguments.items()
    ):
        return False
    return all(
        name in call.arguments and judge_text(match, *_as_text(call.arguments[name])).score == 1.0
        for name, match in expected.matching.items()
    )


def _as_text(value: Any) -> tuple[str, Any]:
    return (value, None) if isinstance(value, str) else (json.dumps(value, ensure_ascii=False), value)


def _describe_call(expected: ExpectedCall) -> str:
    arguments = [f"{name}={format_short(value)}" for name, value in expected.arguments.items()]
    arguments += [f"matching {name}" for name in expected.matching]
    return expected.tool + (f" with {', '.join(arguments)}" if arguments else "")


def judge_results(grader: ResultGrader, calls: Sequence[RecordedCall]) -> GraderVerdict:
    """Return the verdict on the last result, or on all results if `any` is set: one must pass."""
    tested = [call for call in calls if grader.tool in (None, call.tool)]
    if not tested:
        return GraderVerdict(0.0, f"no call{f' of {grader.tool}' if grader.tool else ''}")
    verdict = GraderVerdict(0.0, "")
    for call in reversed(tested):
        if call.error:
            verdict = GraderVerdict(0.0, f"the last call of {call.tool} failed: {format_short(call.text)}")
        else:
            verdict = judge_text(grader, call.text, call.data)
        if verdict.score == 1.0 or not grader.any:
            return verdict
    return GraderVerdict(
        0.0, f"none of {counted(len(tested), 'result')} passes; the first: {verdict.explanation}"
    )


def json_equal(expected: Any, found: Any) -> bool:
    """Return True if two JSON values are equal. 1 equals 1.0, but 1 does not equal true."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return expected.keys() == found.keys() and all(json_equal(expected[k], found[k]) for k in expected)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(json_equal, expected, found))
    return bool(expected == found)


def format_short(value: Any) -> str:
    """Return a value as one line of at most 80 characters, for a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    text = " ".join(text[: 4 * _MAX_SHOWN_CHARS].split())
    text = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
    return repr(text) if isinstance(value, str) else text


def _json(text: str) -> Any:
    """Return the JSON value of a text or of its last Markdown code block, or _ABSENT if neither is JSON."""
    for candidate in (text, *_FENCE.findall(text)[-1:]):
        try:
            return json.loads(candidate, parse_constant=int)  # `int` refuses NaN and Infinity
        except (ValueError, RecursionError):
            continue
    return _ABSENT


def _select(path: str, value: Any) -> list[Any]:
    import jsonpath

    try:
        return list(jsonpath.findall(path, value))
    except (jsonpath.JSONPathError, RecursionError, ValueError):  # it parses a text with braces as JSON
        return []
