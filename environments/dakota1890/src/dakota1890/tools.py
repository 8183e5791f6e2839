"""The record as tools: look a word up, read a rule, see the forms of a word that are known from training.

A tool tells everything but answers: no Dakota form that a held-out task accepts, and nothing that the task
at hand accepts, is in any output, as a word or a phrase. Instead stands [withheld]. Bare words of the
dictionary that train tasks say themselves (saŋpa) may be told, and so may English meanings in tasks that do
not ask for them. Outputs are short, come in pages, and depend on the arguments and the task alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dakota1890.corpus import Entry, Kin, Noun, Verb, load_corpus
from dakota1890.families import FAMILIES, conjugate, kin, possess
from dakota1890.families.dictionary import dictionary_entries
from dakota1890.orthography import bare, canonical
from dakota1890.questions import JSON, MEANING, NUMBER, Question
from dakota1890.splits import side_of
from dakota1890.tasks import DEPTHS, TaskOptions, TrainTasks, eval_tasks

PAGE = 8
WITHHELD = "[withheld]"
_LONGEST_QUERY = 80
_TRAIN_TASKS_READ = 3_000
_TOKEN = re.compile(r"(?:[^\W\d_]|['’ʼ\u0300-\u036f])+")
_FINALS = {"keeps": "stays", "changes": "becomes e", "either": "stays or becomes e"}


def _tool(name: str, description: str, argument: str, what: str, *, paged: bool = True) -> dict[str, Any]:
    properties: dict[str, Any] = {argument: {"type": "string", "description": what}}
    if paged:
        properties["page"] = {"type": "integer", "description": "Which page of the results, from 1."}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: tuple[Mapping[str, Any], ...] = (
    _tool(
        "lookup_dakota", "Find a Dakota word in the dictionary.", "form", "The word, marks may be missing."
    ),
    _tool("lookup_english", "Find Dakota words by their English meaning.", "word", "An English word."),
    _tool(
        "show_rule", "Read the grammar on a topic.", "topic", "Such as: plural, negation, numerals, POSS-03."
    ),
    _tool(
        "paradigm",
        "The class of a verb, noun or kin term, where its marker goes, and some of its forms.",
        "lemma",
        "The word as the dictionary has it.",
        paged=False,
    ),
)
"""The four tools in the OpenAI form."""


class DakotaTools:
    """The tools during one task; `data` is the task's."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        own = [] if data["answer"] == JSON else [canonical(form) for form in data["accept"]]
        if _asks_meaning(data):  # then the form is not looked up
            own += [canonical(form) for form in data["prompt_forms"]]
        self._own = frozenset(own)
        self._own_phrases = _phrases(self._own)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool of `TOOLS`. Raises KeyError for another name."""
        (query,) = (value for key, value in arguments.items() if key != "page")
        if len(query) > _LONGEST_QUERY:
            return f"That is too long: at most {_LONGEST_QUERY} characters."
        tools: dict[str, Callable[[str], Iterable[str]]] = {
            "lookup_dakota": self._lookup_dakota,
            "lookup_english": self._lookup_english,
            "show_rule": _show_rule,
            "paradigm": self._paradigm,
        }
        lines = list(tools[name](query))
        text = "\n".join(lines) if name == "paradigm" else _page(lines, arguments.get("page", 1))
        return self._redacted(text) or _nothing(name)

    def _lookup_dakota(self, form: str) -> Iterable[str]:
        asked = canonical(form)
        found = [entry for entry in _dictionary() if self._is(entry.form, asked)]
        if not found and asked not in self._own:
            found = [entry for entry in _dictionary() if asked in canonical(entry.form).split()]
        return map(_entry_line, found)

    def _lookup_english(self, word: str) -> Iterable[str]:
        wanted = " ".join(_TOKEN.findall(word.lower())).removeprefix("to ")
        glosses = ((entry, " ".join(_TOKEN.findall(entry.gloss.lower()))) for entry in _dictionary())
        found = [(entry, gloss) for entry, gloss in glosses if wanted and f" {wanted} " in f" {gloss} "]
        return (_entry_line(entry) for entry, gloss in sorted(found, key=lambda pair: len(pair[1])))

    def _paradigm(self, lemma: str) -> Iterable[str]:
        asked, corpus = canonical(lemma), load_corpus()
        for verb in corpus.verbs:
            if self._is(verb.lemma, asked):
                yield from _verb_lines(verb)
        for noun in corpus.nouns:
            if self._is(noun.lemma, asked):
                yield from _noun_lines(noun)
        for term in corpus.kin:
            if self._is(term.lemma, asked):
                yield from _kin_lines(term)

    def _is(self, form: str, asked: str) -> bool:
        """Whether `form` is what was asked for, perhaps without its marks, and is no answer itself: else a
        guess could be checked by looking it up."""
        known = canonical(form)
        spellings = {known, *(canonical(s) for s, _ in load_corpus().variants.get(form, ()))}
        return self._tells(form) and (asked in spellings or bare(asked) == bare(known))

    def _tells(self, form: str) -> bool:
        return canonical(form) not in self._own

    def _redacted(self, text: str) -> str:
        """`text` without any form that must not be told. The one place through which every output goes."""
        for phrases in (_withheld_phrases(), self._own_phrases):
            text = _without(text, phrases)
        return text


def system_prompt(max_calls: int) -> str:
    """What the model is told before the question. In few words: English ones may be answers."""
    return f"Dakota grammar. Limit: {max_calls} tool calls."


def tool_prompt(prompt: str, data: Mapping[str, Any]) -> str:
    """A prompt without what the tools tell: the gloss, the class and the place of the marker."""
    if data["invented"]:
        return prompt
    for lemma in data["lemma_ids"]:
        for described, word in _descriptions().get(lemma, ()):
            prompt = prompt.replace(described, word)
    return prompt


def _show_rule(topic: str) -> list[str]:
    wanted = bare(canonical(topic)).split()
    named = [rule for rule in load_corpus().rules.values() if rule.rule_id.lower() == topic.strip().lower()]
    found = named or [
        rule
        for rule in load_corpus().rules.values()
        if wanted
        and all(w in bare(canonical(f"{rule.category} {rule.description} {rule.pattern}")) for w in wanted)
    ]
    lines = []
    for rule in found:
        examples = "; ".join(f'"{dakota}" {english}' for dakota, english in rule.examples[:3])
        shown = f" Examples: {examples}." if examples else ""
        lines.append(f"{rule.rule_id} ({rule.category}): {rule.description}{shown}")
    return lines


def _verb_lines(verb: Verb) -> Iterable[str]:
    final = _FINALS.get(verb.final, "is not recorded") if verb.lemma.endswith("a") else ""
    yield conjugate.introduce(verb) + (f". Final a before kta and šni: {final}." if final else ".")
    for person in verb.persons:
        yield _cell(conjugate.PERSON_NAMES[person], conjugate.question(verb, person))


def _noun_lines(noun: Noun) -> Iterable[str]:
    yield f"{_described_noun(noun)}."
    for person in noun.persons:
        yield _cell(possess.OWNER_NAMES[person], possess.question(noun, person))


def _kin_lines(term: Kin) -> Iterable[str]:
    whose = f"a {term.speaker}'s {term.relation}" if term.speaker in ("man", "woman") else term.relation
    yield f'Dakota kin term "{term.lemma}" ({whose}).'
    if "2sg" in term.forms:
        yield _cell("thy", kin.thy(term))
    if "3sg" in term.forms:
        yield _cell("his or her", kin.his_or_her(term))
    if "ya" in term.forms:
        yield _cell("he has as", kin.having(term, "3sg"))


def _cell(label: str, question: Question) -> str:
    told = side_of(question) == "train"
    return f"{label}: {question.accept[0] if told else WITHHELD}"


def _entry_line(entry: Entry) -> str:
    note = "" if entry.status in ("sound", "corrected") else f" ({entry.status})"
    return f'"{canonical(entry.form)}" ({entry.pos}): {entry.gloss}{note}'


def _page(lines: Sequence[str], page: int) -> str:
    """The lines of one page, with a note on the others; "" if there are none at all."""
    pages = -(-len(lines) // PAGE)
    if not lines:
        return ""
    if not 1 <= page <= pages:
        return f"There {'is 1 page' if pages == 1 else f'are {pages} pages'}."
    more = [f"(page {page} of {pages})"] if pages > 1 else []
    return "\n".join([*lines[(page - 1) * PAGE : page * PAGE], *more])


def _nothing(name: str) -> str:
    if name != "show_rule":
        return "Nothing was found."
    return (
        f"Nothing was found. Topics: {', '.join(sorted({r.category for r in load_corpus().rules.values()}))}."
    )


@lru_cache(maxsize=1)
def _dictionary() -> tuple[Entry, ...]:
    """The entries that may be told of, affixes included; and the words that only the paradigm tables have."""
    corpus = load_corpus()
    entries = [entry for entry in corpus.entries if entry.status != "excluded"]
    known = {canonical(entry.form) for entry in entries}
    tables = [(v.lemma, "v.", v.gloss) for v in corpus.verbs] + [
        (n.lemma, "n.", n.gloss) for n in corpus.nouns
    ]
    tables += [(k.lemma, "n.", k.relation) for k in corpus.kin]
    further = [
        Entry(form=form, pos=pos, gloss=gloss, status="sound", note="", source="")
        for form, pos, gloss in tables
        if canonical(form) not in known
    ]
    return (*entries, *further)


@lru_cache(maxsize=1)
def _descriptions() -> Mapping[str, Sequence[tuple[str, str]]]:
    """Lemma -> how prompts introduce it at length, and the word alone. Of words that are spelt alike, none:
    the gloss tells them apart."""
    found: dict[str, list[list[tuple[str, str]]]] = {}
    for verb in load_corpus().verbs:
        word = f'Dakota verb "{verb.lemma}"'
        texts = [(conjugate.introduce(verb), word), (conjugate.name(verb), word)]
        found.setdefault(verb.lemma, []).append(texts)
    for noun in load_corpus().nouns:
        texts = [(_described_noun(noun), f'Dakota noun "{noun.lemma}"')]
        found.setdefault(noun.lemma, []).append(texts)
    return {lemma: words[0] for lemma, words in found.items() if len(words) == 1}


def _described_noun(noun: Noun) -> str:
    return f'Dakota noun "{noun.lemma}" ({noun.gloss}), {noun.klass}'


Phrases = Mapping[str, Sequence[tuple[str, ...]]]
"""First word -> the phrases, longest first, that begin with it."""


def _phrases(forms: Iterable[str]) -> Phrases:
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for words in {tuple(form.split()) for form in forms if form}:
        by_first.setdefault(words[0], []).append(words)
    return {first: sorted(phrases, key=len, reverse=True) for first, phrases in by_first.items()}


@lru_cache(maxsize=1)
def withheld_forms() -> frozenset[str]:
    """What no tool tells in any task: the Dakota answers of held-out tasks, but for bare words that train
    tasks say."""
    held_out = (item.data for item in eval_tasks(tuple(FAMILIES), DEPTHS, True))
    answers = {form for data in held_out if not _asks_meaning(data) for form in data["accept"]}
    bare_words = {canonical(entry.form) for entry in dictionary_entries()}
    return frozenset(answers - (bare_words & _train_words()))


def _train_words() -> set[str]:
    """The Dakota words that train tasks show or accept."""
    tasks = [item.data for item in TrainTasks(TaskOptions(), _TRAIN_TASKS_READ)]
    said = [form for data in tasks for form in data["prompt_forms"]]
    said += [form for data in tasks if not _asks_meaning(data) for form in data["accept"]]
    return {word for form in said for word in form.split()}


def _asks_meaning(data: Mapping[str, Any]) -> bool:
    """Whether the answer is what a Dakota form means, and not a Dakota form."""
    return data["answer"] in (MEANING, NUMBER, JSON)


@lru_cache(maxsize=1)
def _withheld_phrases() -> Phrases:
    return _phrases(withheld_forms())


def _without(text: str, phrases: Phrases) -> str:
    """`text` with every phrase in it replaced by [withheld]. Words are compared in canonical spelling."""
    tokens = list(_TOKEN.finditer(text))
    words = [canonical(token.group()) for token in tokens]
    parts, told, at = [], 0, 0
    while at < len(words):
        length = next((len(p) for p in phrases.get(words[at], ()) if tuple(words[at : at + len(p)]) == p), 0)
        if length:
            parts += [text[told : tokens[at].start()], WITHHELD]
            told = tokens[at + length - 1].end()
        at += max(1, length)
    return "".join([*parts, text[told:]])
