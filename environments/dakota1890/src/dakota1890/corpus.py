"""The packaged record: lexicon, variants, rules and the paradigm tables, checked against recorded hashes.

Every entry carries where it comes from. Nothing is fetched; nothing is generated from a language model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

from dakota1890.errors import DakotaError
from dakota1890.orthography import canonical

SLOT = "·"
"""Marks in `verbs.csv` the place of the person marker: `ma·noŋ`."""

R = TypeVar("R")

Spellings = tuple[str, ...]
"""Forms that a file separates by semicolons; other lists are separated by spaces."""


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
class Verb:
    """A verb whose class is attested or licensed by a rule.

    `at` and `dual_at` are the offsets in `lemma` where the markers of I/thou and of we stand. `final` is what
    kta and šni do to a final a: keeps, changes (to e), either (both printed) or unknown. `attested` pairs a
    person with a form found in the record. `derives` names what else can be made of it: object, dative,
    benefactive, possessive, reflexive, absolute, causative. `klass` is "unknown" where only forms without a
    person marker are on record.
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

    `meaning` is a person, or the meaning as text. `forms` are the recorded ones, `regular` the wrong ones.
    `particles`: "yes" where kta and šni may follow unchanged.
    """

    word: str
    gloss: str
    kind: str
    meaning: str
    forms: Spellings
    regular: Spellings
    rules: tuple[str, ...]
    rule: str
    particles: str
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
    """A noun formed of `base`, which no question asks for, with the `forms` that the rules license.

    `attested` is "" where only a rule licenses it.
    """

    base: str
    root: str
    forms: Spellings
    attested: str


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
    english: Spellings
    attested: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Words around a conjugated verb: `words` with {} for it. `rule` says where they stand.

    use: particle (kta or šni), person (any person), command, prohibition or participle.
    """

    name: str
    use: str
    meaning: str
    words: str
    rule_id: str
    rule: str

    def around(self, form: str) -> str:
        """Return `form` in this frame."""
        return self.words.replace("{}", form)


@dataclass(frozen=True, kw_only=True, slots=True)
class Person:
    """The English of a person as subject, object and owner, and of the owner alone (mine, PRON-04).

    `object` is "" where no form is asked with it. `alone_form` is the Dakota word for `alone`.
    """

    person: str
    subject: str
    object: str
    owner: str
    alone: str
    alone_form: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A noun that owns or is owned. `english` of an owner is its singular and plural.

    role: owner, animal (an owner), people's or anybody's (a thing of people alone, or of animals too).
    """

    word: str
    role: str
    english: Spellings


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Everything packaged.

    `variants` maps a form to its attested other spellings, each with its kind, and `rules` an identifier to
    its entry in `rules.json`.
    """

    entries: tuple[Entry, ...]
    variants: Mapping[str, tuple[tuple[str, str], ...]]
    rules: Mapping[str, Mapping[str, Any]]
    verbs: tuple[Verb, ...]
    nouns: tuple[Noun, ...]
    kin: tuple[Kin, ...]
    derived: tuple[Derived, ...]
    irregulars: tuple[Irregular, ...]
    sentence_words: tuple[SentenceWord, ...]
    frames: tuple[Frame, ...]
    persons: tuple[Person, ...]
    owned: tuple[Owned, ...]
    content_hash: str
    words: frozenset[str] = field(repr=False)
    """Every single word of every form, canonical: what an invented word must not be."""


@lru_cache(maxsize=1)
def load_corpus() -> Corpus:
    """Read and check the packaged data. Raises CorpusError naming a file that was altered."""
    texts, content_hash = _read_checked()
    entries = _table(Entry, texts["lexicon.csv"])
    variants: dict[str, tuple[tuple[str, str], ...]] = defaultdict(tuple)
    for row in _rows(texts["variants.csv"]):
        variants[row["form"]] += ((row["attested"], row["kind"]),)
    rules = {rule["rule_id"]: rule for rule in json.loads(texts["rules.json"])}
    verbs, nouns = _table(Verb, texts["verbs.csv"]), _table(Noun, texts["nouns.csv"])
    irregulars = _table(Irregular, texts["irregular.csv"])
    spellings = [entry.form for entry in entries]
    spellings += [spelling for group in variants.values() for spelling, _ in group]
    spellings += [example["dakota"] for rule in rules.values() for example in rule["examples"]]
    spellings += [verb.lemma for verb in verbs] + [noun.lemma for noun in nouns]
    spellings += [form for irregular in irregulars for form in irregular.forms]
    return Corpus(
        entries=entries,
        variants=dict(variants),
        rules=rules,
        verbs=verbs,
        nouns=nouns,
        kin=_table(Kin, texts["kin.csv"]),
        derived=_table(Derived, texts["derived.csv"]),
        irregulars=irregulars,
        sentence_words=_table(SentenceWord, texts["sentence_words.csv"]),
        frames=_table(Frame, texts["frames.csv"]),
        persons=_table(Person, texts["persons.csv"]),
        owned=_table(Owned, texts["owned.csv"]),
        content_hash=content_hash,
        words=frozenset(word for spelling in spellings for word in canonical(spelling).split()),
    )


def _read_checked() -> tuple[dict[str, str], str]:
    """Return the data files' texts, and one SHA-256 over their recorded hashes."""
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


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`1sg:wakaška;2sg:yakaška` -> (("1sg", "wakaška"), ("2sg", "yakaška"))."""
    pairs = [item.partition(":") for item in text.split(";") if item]
    return tuple((person, form) for person, _, form in pairs)


_COLUMNS: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
    "klass": lambda row: row["class"],
    "at": lambda row: row["marked"].index(SLOT),
    "dual_at": lambda row: (row["dual"] or row["marked"]).index(SLOT),
    "kinds": lambda row: frozenset(row["kinds"].partition(" > ")[0].split()),
    "object_kinds": lambda row: frozenset(row["kinds"].partition(" > ")[2].split()),
}
"""Field -> its value in a row, where that is not the text of its column or follows from the field's type."""

_TYPES: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "tuple[str, ...]": lambda text: tuple(text.split()),
    "Spellings": lambda text: tuple(text.split(";")) if text else (),
    "tuple[tuple[str, str], ...]": _pairs,
}


def _table(kind: type[R], text: str) -> tuple[R, ...]:
    """Return the rows of a CSV file as objects of a data class, each value by the type of its field."""
    return tuple(
        kind(
            **{
                column.name: _COLUMNS[column.name](row)
                if column.name in _COLUMNS
                else _TYPES[str(column.type)](row[column.name])
                for column in fields(kind)  # type: ignore[arg-type]
            }
        )
        for row in _rows(text)
    )
