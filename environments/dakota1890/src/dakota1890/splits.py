"""Which lemmas and numbers are held out.

Lemmas that share a root, a spelling or a gloss form one group (baksa, wabaksa, kaksa; "red" and "red,
scarlet"), and a group stays on one side whole: no fact about it, forward or backward, crosses. The side is a
hash of the group's name, so it never depends on a seed. `SALT` was picked among a few hundred so that about
30 % of the lemmas of every verb and noun class are held out; no model's score was looked at.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from dakota1890.corpus import Entry, load_corpus
from dakota1890.orthography import canonical

SALT = "dakota1890/45"
HELD_OUT_LEMMAS = 0.3
HELD_OUT_NUMBERS = 0.2
_LEADING_ARTICLE = re.compile(r"^(?:a|an|the) ")


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def held_out_lemma(lemma: str) -> bool:
    """Whether facts about `lemma` belong to the evaluation."""
    group = _groups().get(canonical(lemma), canonical(lemma))
    return hash_fraction(f"{SALT}:{group}") < HELD_OUT_LEMMAS


@lru_cache(maxsize=16_384)
def held_out_number(number: int) -> bool:
    """Whether `number` belongs to the evaluation. One to ten, the words all others are made of, never do."""
    return number > 10 and hash_fraction(f"{SALT}:number:{number}") < HELD_OUT_NUMBERS


def gloss_parts(entry: Entry) -> frozenset[str]:
    """The senses a gloss lists: `to bind, tie` -> {to bind, tie}; a name has one."""
    if entry.pos == "name":
        return frozenset({entry.gloss.lower()})
    parts = (part.strip().lower() for part in re.split("[,;]", entry.gloss))
    return frozenset(_LEADING_ARTICLE.sub("", part) for part in parts if part)


@lru_cache(maxsize=1)
def _groups() -> dict[str, str]:
    """Canonical lemma -> the name of its group."""
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
    for lemma, root in [(v.lemma, v.root) for v in corpus.verbs] + [(n.lemma, n.root) for n in corpus.nouns]:
        join(canonical(lemma), root)
    return {node: find(node) for node in list(parent)}
