"""What can be read from tasks without understanding them: prompts, quotations, answers, answer formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from buckeye.envs.base import Message, Task

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the answer in a format."""

_TAG = re.compile(r"<([A-Za-z][\w-]*)>[^<>]{0,80}</\1>")
_BOXED = re.compile(r"\\boxed\{")
_HASHES = re.compile(r"^#### ", re.MULTILINE)
_REASONING_TAGS = frozenset({"think", "thinking", "reasoning", "scratchpad"})
_QUOTED = re.compile(r'"([^"\n]+)"|“([^”\n]+)”|«([^»\n]+)»|`([^`\n]+)`')
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
    """The answers in `data["accept"]`, or the one in `data["answer"]`; empty where the task names none."""
    accept = task.data.get("accept", task.data.get("answer", ()))
    if isinstance(accept, str):
        return (accept,)
    if isinstance(accept, Iterable):
        return tuple(answer for answer in accept if isinstance(answer, str))
    return ()


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
