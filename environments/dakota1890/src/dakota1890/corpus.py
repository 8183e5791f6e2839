"""The packaged record: lexicon, variants, rules, flags and the paradigm tables, checked against recorded
hashes.

Every entry carries where it comes from. Nothing is fetched; nothing is generated from a language model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from dakota1890.errors import DakotaError
from dakota1890.orthography import canonical

SLOT = "·"
"""Marks in `verbs.csv` the place of the person marker: `ma·noŋ`."""


class CorpusError(DakotaError):
    """A packaged data file is not the one that was released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One lexicon entry. `status` is sound, corrected, inferred-gloss, unchecked or excluded; `note` why."""

    form: str
    pos: str
    gloss: str
    status: str
    note: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One statement of the grammar, with its examples as (Dakota, English) pairs."""

    rule_id: str
    category: str
    description: str
    pattern: str
    confidence: str
    source: str
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """A verb whose class is attested or licensed by a rule.

    `at` and `dual_at` are the offsets in `lemma` where the markers of I/thou and of we stand. `final` says
    what kta and šni do to a final a: keeps, changes (to e), either (both printed) or unknown. `attested`
    pairs a person with a form found in the record. `derives` names what else can be made of it: object,
    dative, benefactive, possessive, reflexive, absolute, causative. `klass` is "unknown" where only forms
    without a person marker are on record.
    """

    lemma: str
    gloss: str
    klass: str
    at: int
    dual_at: int
    persons: tuple[str, ...]
    final: str
    root: str
    rules: tuple[str, ...]
    derives: tuple[str, ...] = ()
    attested: tuple[tuple[str, str], ...] = ()
    evidence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Irregular:
    """A form for which the rules of its `kind` (verb, noun, kin, number, think) give a wrong one.

    `meaning` is a person, or the meaning in words. `forms` are the recorded ones, `regular` the wrong ones.
    `particles`: whether kta and šni may follow unchanged.
    """

    word: str
    gloss: str
    kind: str
    meaning: str
    forms: tuple[str, ...]
    regular: tuple[str, ...]
    rules: tuple[str, ...]
    rule: str
    particles: bool
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Noun:
    """A noun whose way of being possessed is attested or licensed by a rule."""

    lemma: str
    gloss: str
    klass: str
    persons: tuple[str, ...]
    root: str
    rules: tuple[str, ...]
    attested: tuple[tuple[str, str], ...] = ()
    evidence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kin:
    """A kin term.

    speaker: whose relative it is: man, woman, either (recorded for both), or "" where no sex is recorded.
    forms: what the record licenses of 2sg (thy), 3sg (his or her) and ya (the verb "to have as").
    `attested` pairs one of 2sg, 3sg, or 1sg of that verb with a form found in the record.
    """

    lemma: str
    relation: str
    speaker: str
    forms: tuple[str, ...]
    root: str
    rules: tuple[str, ...]
    attested: tuple[tuple[str, str], ...] = ()
    evidence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """A noun formed of `base`.

    part: adjective, verb, body part or noun. kind: abstract, place, agent, human, ruminant, bear, fish or
    little. final: what a final a of the base does: keeps, changes (to e) or either. `noun_gloss` and
    `attested` are "" where only the rule licenses the noun.
    """

    base: str
    gloss: str
    part: str
    kind: str
    final: str
    noun_gloss: str
    root: str
    rules: tuple[str, ...]
    attested: str = ""
    evidence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceWord:
    """A recorded word that sentences are made of.

    role: noun, verb, dwelling (a verb of place), adjective, adverb, postposition, company (with) or
    degree. kinds: what a noun is (person, animal, thing, ...); for the others the kinds of noun that they
    go with, for a verb those of its subject and whether it is one of motion. object_kinds: those of a
    verb's object, and what a postposition wants of its verb. english: singular and plural of a noun (no
    plural: ""), the plain, he- and thou-form of a verb, or one word.
    """

    word: str
    role: str
    kinds: frozenset[str]
    object_kinds: frozenset[str]
    english: tuple[str, ...]
    attested: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Everything packaged. `variants` maps a form to its attested other spellings, each with its kind."""

    entries: tuple[Entry, ...]
    variants: Mapping[str, tuple[tuple[str, str], ...]]
    flags: tuple[Mapping[str, str], ...]
    rules: Mapping[str, Rule]
    verbs: tuple[Verb, ...]
    nouns: tuple[Noun, ...]
    kin: tuple[Kin, ...]
    derived: tuple[Derived, ...]
    irregulars: tuple[Irregular, ...]
    sentence_words: tuple[SentenceWord, ...]
    content_hash: str
    words: frozenset[str] = field(repr=False)
    """Every single word of every form, canonical: what an invented word must not be."""


@lru_cache(maxsize=1)
def load_corpus() -> Corpus:
    """Read and check the packaged data. Raises CorpusError naming a file that was altered."""
    texts, content_hash = _read_checked()
    entries = tuple(Entry(**row) for row in _rows(texts["lexicon.csv"]))
    variants: dict[str, tuple[tuple[str, str], ...]] = {}
    for row in _rows(texts["variants.csv"]):
        variants[row["form"]] = (*variants.get(row["form"], ()), (row["attested"], row["kind"]))
    rules = {item["rule_id"]: _rule(item) for item in json.loads(texts["rules.json"])}
    verbs = tuple(_verb(row) for row in _rows(texts["verbs.csv"]))
    nouns = tuple(_noun(row) for row in _rows(texts["nouns.csv"]))
    irregulars = tuple(_irregular(row) for row in _rows(texts["irregular.csv"]))
    kin = tuple(_kin(row) for row in _rows(texts["kin.csv"]))
    derived = tuple(_derived(row) for row in _rows(texts["derived.csv"]))
    spellings = [entry.form for entry in entries]
    spellings += [spelling for group in variants.values() for spelling, _ in group]
    spellings += [dakota for rule in rules.values() for dakota, _ in rule.examples]
    spellings += [verb.lemma for verb in verbs] + [noun.lemma for noun in nouns]
    spellings += [form for irregular in irregulars for form in irregular.forms]
    words = frozenset(word for spelling in spellings for word in canonical(spelling).split())
    return Corpus(
        entries=entries,
        variants=variants,
        flags=tuple(_rows(texts["flags.csv"])),
        rules=rules,
        verbs=verbs,
        nouns=nouns,
        kin=kin,
        derived=derived,
        irregulars=irregulars,
        sentence_words=tuple(_sentence_word(row) for row in _rows(texts["sentence_words.csv"])),
        content_hash=content_hash,
        words=words,
    )


def _read_checked() -> tuple[dict[str, str], str]:
    """The data files' texts, and one SHA-256 over their recorded hashes."""
    folder = resources.files("dakota1890") / "data"
    recorded: dict[str, str] = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
    texts = {}
    for name, digest in recorded.items():
        content = (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise CorpusError(
                f"dakota1890: the packaged file data/{name} differs from the released one "
                f"(SHA-256 in data/manifest.json). Reinstall dakota1890."
            )
        texts[name] = content.decode("utf-8")
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(recorded.items()))
    return texts, hashlib.sha256(lines.encode()).hexdigest()


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _rule(item: Mapping[str, Any]) -> Rule:
    examples = tuple((example["dakota"], example["english"]) for example in item["examples"])
    return Rule(**{**item, "examples": examples})


def _verb(row: Mapping[str, str]) -> Verb:
    marked = row["marked"]
    return Verb(
        lemma=row["lemma"],
        gloss=row["gloss"],
        klass=row["class"],
        at=marked.index(SLOT),
        dual_at=(row["dual"] or marked).index(SLOT),
        persons=tuple(row["persons"].split()),
        final=row["final"],
        root=row["root"],
        rules=tuple(row["rules"].split()),
        derives=tuple(row["derives"].split()),
        attested=_pairs(row["attested"]),
        evidence=row["evidence"],
    )


def _irregular(row: Mapping[str, str]) -> Irregular:
    return Irregular(
        word=row["word"],
        gloss=row["gloss"],
        kind=row["kind"],
        meaning=row["meaning"],
        forms=tuple(row["forms"].split(";")),
        regular=tuple(form for form in row["regular"].split(";") if form),
        rules=tuple(row["rules"].split()),
        rule=row["rule"],
        particles=row["particles"] == "yes",
        evidence=row["evidence"],
    )


def _noun(row: Mapping[str, str]) -> Noun:
    return Noun(
        lemma=row["lemma"],
        gloss=row["gloss"],
        klass=row["class"],
        persons=tuple(row["persons"].split()),
        root=row["root"],
        rules=tuple(row["rules"].split()),
        attested=_pairs(row["attested"]),
        evidence=row["evidence"],
    )


def _kin(row: Mapping[str, str]) -> Kin:
    return Kin(
        lemma=row["lemma"],
        relation=row["relation"],
        speaker=row["speaker"],
        forms=tuple(row["forms"].split()),
        root=row["root"],
        rules=tuple(row["rules"].split()),
        attested=_pairs(row["attested"]),
        evidence=row["evidence"],
    )


def _derived(row: Mapping[str, str]) -> Derived:
    return Derived(**{**row, "rules": tuple(row["rules"].split())})  # type: ignore[arg-type]


def _sentence_word(row: Mapping[str, str]) -> SentenceWord:
    kinds, _, object_kinds = row["kinds"].partition(" > ")
    return SentenceWord(
        word=row["word"],
        role=row["role"],
        kinds=frozenset(kinds.split()),
        object_kinds=frozenset(object_kinds.split()),
        english=tuple(row["english"].split(";")),
        attested=row["attested"],
        evidence=row["evidence"],
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`1sg:wakaška;2sg:yakaška` -> (("1sg", "wakaška"), ("2sg", "yakaška"))."""
    pairs = [item.partition(":") for item in text.split(";") if item]
    return tuple((person, form) for person, _, form in pairs)
