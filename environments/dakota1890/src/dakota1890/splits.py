"""Side of a question: training, or one of the held-out axes.

    random     a fact of known words in known cells, held out by chance
    lemma      a word of the question is held out
    cell       a rule x word class is held out; rule and class occur in training, not together
    rule       a rule is held out
    range      a number that is neither below 100 nor round
    exception  the exceptions of the grammar, which are only evaluated

The side is the first of exception, rule, range, lemma, cell, random that applies, else training. It follows
from the subject of the question, never from a seed or from the direction of the question, and nothing held
out occurs in a train question in any role.

Lemmas that share a root, a spelling or a gloss form one group (baksa, wabaksa, kaksa; "red" and "red,
scarlet"), and all of a group is on one side. `SALT` was picked among a few hundred so that about 30 % of the
lemmas of every verb and noun class are held out, without regard to any model's score.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache, lru_cache
from importlib import resources

from dakota1890.corpus import Entry, load_corpus
from dakota1890.orthography import canonical
from dakota1890.questions import Question

SALT = "dakota1890/45"
AXES = ("random", "lemma", "cell", "rule", "range", "exception")
HELD_OUT_LEMMAS = 0.3
HELD_OUT_FACTS = 0.1

_HELD_OUT = json.loads((resources.files("dakota1890") / "data" / "held_out.json").read_text("utf-8"))

HELD_OUT_RULES = frozenset(_HELD_OUT["rules"])
"""Rules that no train question needs."""

HELD_OUT_CELLS = frozenset(_HELD_OUT["cells"])
"""Rule x class pairs that no train question has; each rule and each class occurs in training with others."""

_LEADING_ARTICLE = re.compile(r"^(?:a|an|the) ")


def side_of(question: Question, *, exception: bool = False) -> str:
    """Return `train` or the axis on which `question` is held out.

    It is `exception` if its family is only evaluated.
    """
    if exception:
        return "exception"
    if not HELD_OUT_RULES.isdisjoint(question.rule_ids):
        return "rule"
    if question.number is not None and not is_in_train_range(question.number):
        return "range"
    if not question.invented and any(map(is_held_out_lemma, question.lemma_ids)):
        return "lemma"
    if not HELD_OUT_CELLS.isdisjoint(question.cells):
        return "cell"
    if not question.invented and any(map(is_held_out_fact, question.facts)):
        return "random"
    return "train"


def is_in_train_range(number: int) -> bool:
    """Return True if a number is below 100, or one digit followed by zeros.

    So training covers every numeral word, but few combinations.
    """
    return number < 100 or len(str(number).rstrip("0")) == 1


@lru_cache(maxsize=65_536)
def is_held_out_fact(fact: str) -> bool:
    """Return True if a fact is held out by chance.

    Excluded are the numbers one to ten, 100 and 1,000, which make all others, and the meanings of words,
    because prompts of every family show them.
    """
    if fact in _BASIC_NUMBERS or fact.endswith("/gloss"):
        return False
    return hash_fraction(f"{SALT}:fact:{fact}") < HELD_OUT_FACTS


_BASIC_NUMBERS = frozenset(f"number/{number}" for number in (*range(1, 11), 100, 1_000))


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) that depends only on `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


@lru_cache(maxsize=65_536)
def is_held_out_lemma(lemma: str) -> bool:
    """Return True if facts about `lemma` belong to the evaluation. Numbers are not lemmas."""
    if lemma.isdecimal():
        return False
    group = _groups().get(canonical(lemma), canonical(lemma))
    return hash_fraction(f"{SALT}:{group}") < HELD_OUT_LEMMAS


@cache
def gloss_parts(entry: Entry) -> frozenset[str]:
    """Return the senses that a gloss lists: `to bind, tie` -> {to bind, tie}; a name has one."""
    if entry.pos == "name":
        return frozenset({entry.gloss.lower()})
    parts = (part.strip().lower() for part in re.split("[,;]", entry.gloss))
    return frozenset(_LEADING_ARTICLE.sub("", part) for part in parts if part)


@lru_cache(maxsize=1)
def _groups() -> dict[str, str]:
    """Return the name of the group of each canonical lemma."""
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def join(one: str, other: str) -> None:
        first, second = sorted((find(one), find(other)))
        parent[second] = first

    corpus = load_corpus()
    for entry in corpus.entries:
        if entry.pos == "affix":
            continue
        for part in gloss_parts(entry):
            join(canonical(entry.form), f"~{part}")
    roots = [(verb.lemma, verb.root) for verb in corpus.verbs]
    roots += [(noun.lemma, noun.root) for noun in corpus.nouns]
    roots += [(kin.lemma, kin.root) for kin in corpus.kin]
    roots += [(form, noun.root) for noun in corpus.derived for form in (noun.base, noun.attested) if form]
    for lemma, root in roots:
        join(canonical(lemma), root)
    return {node: find(node) for node in list(parent)}
