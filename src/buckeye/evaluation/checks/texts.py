"""What can be read from tasks without understanding them: prompts, quotations, answers, answer formats."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from buckeye.envs.base import Message, Task

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the answer in a format."""

_KEPT = 512  # texts that are read again and again
_TAG = re.compile(r"<([A-Za-z][\w-]*)>[^<>]{0,80}</\1>")
_BOXED = re.compile(r"\\boxed\{")
_HASHES = re.compile(r"^#### ", re.MULTILINE)
_REASONING_TAGS = frozenset({"think", "thinking", "reasoning", "scratchpad"})
_QUOTED = re.compile(r'"([^"\n]+)"|“([^”\n]+)”|«([^»\n]+)»|`([^`\n]+)`')
_NUMBER = re.compile(r"(?<![\w.])(?:(?<![)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?![^\W\d])")
_WORD = re.compile(r"[^\W\d_]+(?:['’ʼ-][^\W\d_]+)*")


def text_of(message: Message) -> str:
    """The text of a message; of the text parts where the content is a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def prompt_of(task: Task) -> str:
    """Everything the task shows, system message included."""
    return "\n".join(text_of(message) for message in task.messages)


def question_of(task: Task) -> str:
    """The last message of the user, or the whole prompt if there is none."""
    said = [text_of(message) for message in task.messages if message.get("role") == "user"]
    return said[-1] if said else prompt_of(task)


def quotations_of(task: Task) -> list[str]:
    """What stands in quotes or backticks in the question, in order."""
    return [next(filter(None, groups)) for groups in _QUOTED.findall(question_of(task))]


def words_of(text: str) -> list[str]:
    """The words of a text: runs of letters, with inner apostrophes and hyphens."""
    return _WORD.findall(text)


def accepted_answers(task: Task) -> tuple[str, ...]:
    """The answers in `data["accept"]`, or the one in `data["answer"]`, as text; empty where the task names
    none. Numbers, truth values and lists of them are written as JSON writes them."""
    return tuple(text for value in _answers(task) if (text := _as_text(value)) is not None)


def written_answers(task: Task) -> tuple[str, ...]:
    """Those of the accepted answers that are text in the data, as a reply would say them. A number may be the
    place of the answer in a list."""
    return tuple(value for value in _answers(task) if isinstance(value, str))


def _answers(task: Task) -> Sequence[Any]:
    if "accept" in task.data:
        accept = task.data["accept"]
        return [accept] if isinstance(accept, str) or not isinstance(accept, Iterable) else list(accept)
    answer = task.data.get("answer")
    texts = isinstance(answer, list | tuple) and all(isinstance(value, str) for value in answer)
    return list(answer) if texts and answer else [answer]


def _as_text(value: Any) -> str | None:
    if hasattr(value, "tolist"):  # a number or an array of numpy or torch
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


def stands_in(prompt: str, answer: str) -> bool:
    """Whether an answer can be read from a prompt: its words as words of their own, in whatever case, or its
    numbers as whole numbers, one after the other, however they are written (3.0 is 3, and 1,300 is 1300)."""
    if not answer.strip():
        return False
    wanted = numbers_of(answer) if not any(char.isalpha() for char in answer) else ()
    if not wanted:
        return holds(" ".join(folded(prompt).split()), " ".join(folded(answer).split()))
    there = numbers_of(prompt)
    return any(there[at : at + len(wanted)] == wanted for at in range(len(there) - len(wanted) + 1))


@lru_cache(_KEPT)
def numbers_of(text: str) -> tuple[Decimal, ...]:
    """The numbers of a text, in order. Digits within a word, as in `x2`, are none."""
    return tuple(Decimal(found.replace("−", "-").replace(",", "")) for found in _NUMBER.findall(text))


def holds(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` with no letter or digit of a longer word beside it."""
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


@lru_cache(_KEPT)
def folded(text: str) -> str:
    """A text without differences of case, of spaces within a line, and of how letters are encoded."""
    lines = unicodedata.normalize("NFC", text).casefold().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


def _in_word(char: str) -> bool:
    return char.isalnum() or unicodedata.category(char).startswith("M")


def answer_formats(texts: Iterable[str]) -> list[str]:
    r"""The formats that prompts ask for, or that replies have: the most common one of each kind.

    Known: `<tag></tag>`, also after tags for the reasoning; `\boxed{}`; `#### answer`. A format is a text
    with `ANSWER` in the place of the answer; the bare answer is not among them.
    """
    chains: Counter[tuple[str, ...]] = Counter()
    boxed = hashes = False
    for text in texts:
        chains[tuple(dict.fromkeys(_TAG.findall(text)))] += 1
        boxed = boxed or bool(_BOXED.search(text))
        hashes = hashes or bool(_HASHES.search(text))
    del chains[()]
    formats = [pattern for chain, _ in chains.most_common(2) for pattern in _tagged(chain)]
    formats += [rf"\boxed{{{ANSWER}}}"] if boxed else []
    formats += [f"#### {ANSWER}"] if hashes else []
    return list(dict.fromkeys(formats))


def _tagged(chain: Sequence[str]) -> list[str]:
    """The answer in its tag alone, and after the other tags of the prompt, left empty."""
    answering = [tag for tag in chain if tag.lower() not in _REASONING_TAGS] or chain
    last = f"<{answering[-1]}>{ANSWER}</{answering[-1]}>"
    before = "".join(f"<{tag}></{tag}>" for tag in chain if tag != answering[-1])
    return [last, before + last] if before else [last]


def in_format(pattern: str | None, answer: str) -> str:
    """The answer in a format; as it is where the format is None."""
    return answer if pattern is None else pattern.replace(ANSWER, answer)
