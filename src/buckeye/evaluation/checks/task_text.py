"""Extract prompts, quotations, answers and answer formats from tasks."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from buckeye.envs.base import Task
from buckeye.monitor.conversation import content_text

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for the answer in a format."""

USUAL_FORMATS = (
    rf"\boxed{{{ANSWER}}}",
    f"#### {ANSWER}",
    f"<answer>{ANSWER}</answer>",
    f"<think></think>\n<answer>{ANSWER}</answer>",
    f"The answer is {ANSWER}",
    f"Answer: {ANSWER}",
)
"""Formats of answers that reward functions usually accept."""

_CACHE_SIZE = 512
_TAG = re.compile(r"<([A-Za-z][\w-]*)>[^<>]{0,80}</\1>")
_BOXED = re.compile(r"\\boxed\{")
_HASHES = re.compile(r"^#### ", re.MULTILINE)
_REASONING_TAGS = frozenset({"think", "thinking", "reasoning", "scratchpad"})
_QUOTED = re.compile(r'"([^"\n]+)"|“([^”\n]+)”|«([^»\n]+)»|`([^`\n]+)`')
_BASE64 = re.compile(
    r"(?<![\w+/=])(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)(?![\w+/=])"
)
_HEX = re.compile(r"(?<!\w)(?:0x)?((?:[0-9a-fA-F]{2}){2,})(?!\w)")
_NUMBER = re.compile(r"(?<![\w.])(?:(?<![)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?![^\W\d])")
_WORD = re.compile(r"[^\W\d_]+(?:['’ʼ-][^\W\d_]+)*")


def prompt_of(task: Task) -> str:
    """Return the full prompt text of a task, including the system message."""
    return "\n".join(content_text(message.get("content")) for message in task.messages)


def question_of(task: Task) -> str:
    """Return the last user message, or the whole prompt if no message is of a user."""
    questions = [
        content_text(message.get("content")) for message in task.messages if message.get("role") == "user"
    ]
    return questions[-1] if questions else prompt_of(task)


def quotations_of(task: Task) -> list[str]:
    """Return the texts in quotes or backticks in the question, in order."""
    return [next(filter(None, groups)) for groups in _QUOTED.findall(question_of(task))]


def words_of(text: str) -> list[str]:
    """Return the words of a text: runs of letters, with inner apostrophes and hyphens."""
    return _WORD.findall(text)


def accepted_answers(task: Task) -> tuple[str, ...]:
    """Return the answers in `data["accept"]`, or else in `data["answer"]`, as text; empty if neither exists.

    Numbers and lists are converted to JSON, and a single boolean to `True` or `False`.
    """
    return tuple(text for value in _answers(task) if (text := _to_text(value)) is not None)


def written_answers(task: Task) -> tuple[str, ...]:
    """Return the accepted answers that are text in the data, so a reply can contain them verbatim.

    A number, in contrast, may be the position of the answer in a list.
    """
    return tuple(value for value in _answers(task) if isinstance(value, str))


def _answers(task: Task) -> Sequence[Any]:
    if "accept" in task.data:
        accept = task.data["accept"]
        return [accept] if isinstance(accept, str) or not isinstance(accept, Iterable) else list(accept)
    answer = task.data.get("answer")
    texts = isinstance(answer, list | tuple) and all(isinstance(value, str) for value in answer)
    return list(answer) if texts and answer else [answer]


def _to_text(value: Any) -> str | None:
    if hasattr(value, "tolist"):  # a number or an array from numpy or torch
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float | list | tuple) and value != []:
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            return None
    return None


def prompt_contains(prompt: str, answer: str) -> bool:
    """Return True if a prompt contains an answer.

    Words match as whole words, in any case. Numbers match by value, in any notation: 3.0 is 3, and
    1,300 is 1300.
    """
    if not answer.strip():
        return False
    wanted = numbers_of(answer) if not any(char.isalpha() for char in answer) else ()
    if not wanted:
        return contains_as_word(" ".join(normalize(prompt).split()), " ".join(normalize(answer).split()))
    numbers = numbers_of(prompt)
    return any(numbers[at : at + len(wanted)] == wanted for at in range(len(numbers) - len(wanted) + 1))


@lru_cache(_CACHE_SIZE)
def numbers_of(text: str) -> tuple[Decimal, ...]:
    """Return the numbers of a text, in order. Digits within a word, as in `x2`, do not count."""
    return tuple(Decimal(number.replace("−", "-").replace(",", "")) for number in _NUMBER.findall(text))


@lru_cache(_CACHE_SIZE)
def with_decoded(prompt: str) -> str:
    """Return a prompt with the texts that it has in base64 or hexadecimal after it."""
    texts = [_decoded(bytes.fromhex, found) for found in _HEX.findall(prompt)]
    texts += [_decoded(partial(base64.b64decode, validate=True), found) for found in _BASE64.findall(prompt)]
    return "\n".join([prompt, *filter(None, texts)])


def _decoded(decode: Callable[[str], bytes], found: str) -> str:
    """Return the decoded text, or "" if the bytes are not printable text."""
    try:
        text = decode(found).decode("utf-8")
    except ValueError:
        return ""
    return text if text.isprintable() else ""


def contains_as_word(text: str, answer: str) -> bool:
    """Return True if `text` contains `answer`, but not as a part of a longer word or number."""
    begins, ends = _in_word(answer[0]), _in_word(answer[-1])
    start = text.find(answer)
    while start >= 0:
        end = start + len(answer)
        if begins and start and _in_word(text[start - 1]):
            start = next((at for at in range(start, len(text)) if not _in_word(text[at])), len(text))
        elif ends and end < len(text) and _in_word(text[end]):
            start += 1
        else:
            return True
        start = text.find(answer, start)
    return False


@lru_cache(_CACHE_SIZE)
def normalize(text: str) -> str:
    """Return the text normalized for comparison: case, spaces within a line, and Unicode form (NFC)."""
    lines = unicodedata.normalize("NFC", text).casefold().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


def _in_word(char: str) -> bool:
    return char.isalnum() or unicodedata.category(char).startswith("M")


def answer_formats(texts: Iterable[str]) -> list[str]:
    r"""Return the most common answer formats in prompts or replies.

    A format is a text with `ANSWER` in place of the answer. Known formats are `<tag></tag>`, also after
    reasoning tags; `\boxed{}`; and `#### answer`. The bare answer is not included.
    """
    chains: Counter[tuple[str, ...]] = Counter()
    boxed = hashes = False
    for text in texts:
        chains[tuple(dict.fromkeys(_TAG.findall(text)))] += 1
        boxed = boxed or bool(_BOXED.search(text))
        hashes = hashes or bool(_HASHES.search(text))
    del chains[()]
    formats = [pattern for chain, _ in chains.most_common(2) for pattern in _tag_formats(chain)]
    formats += [rf"\boxed{{{ANSWER}}}"] if boxed else []
    formats += [f"#### {ANSWER}"] if hashes else []
    return list(dict.fromkeys(formats))


def _tag_formats(chain: Sequence[str]) -> list[str]:
    """Return two formats: the tag of the answer alone, and preceded by the other tags without content."""
    answering = [tag for tag in chain if tag.lower() not in _REASONING_TAGS] or chain
    last = f"<{answering[-1]}>{ANSWER}</{answering[-1]}>"
    before = "".join(f"<{tag}></{tag}>" for tag in chain if tag != answering[-1])
    return [last, before + last] if before else [last]


def apply_format(pattern: str | None, answer: str) -> str:
    """Return the answer in a format. With `pattern=None`, return the answer unchanged."""
    return answer if pattern is None else pattern.replace(ANSWER, answer)
