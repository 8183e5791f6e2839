"""The generators reproduce the record: each attested form is generated, or listed with a reason."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.families import FAMILIES
from dakota1890.families.conjugate import fact
from dakota1890.morphology.nouns import possess
from dakota1890.morphology.numerals import (
    DISTRIBUTIVES,
    ORDINAL_TAILS,
    RESTRICTED,
    fraction,
    numeral,
    only,
    ordinal,
)
from dakota1890.morphology.objects import (
    absolute,
    benefactive,
    causative,
    dative,
    object_pairs,
    possessive,
    reflexive,
    with_object,
)
from dakota1890.morphology.sounds import can_contract, contract
from dakota1890.morphology.verbs import conjugate, with_particle
from dakota1890.orthography import canonical, strip_diacritics
from dakota1890.questions import NUMBER

CORPUS = load_corpus()
VERBS = {(verb.lemma, verb.klass): verb for verb in CORPUS.verbs}
LEXICON = {canonical(entry.form) for entry in CORPUS.entries}

# `made by`: the family and the fact of the question that has the form as an answer, or a function and its
# argument. `reason`: why nothing generates the form.
with (Path(__file__).parent / "attested.csv").open(encoding="utf-8", newline="") as table:
    ATTESTED = list(csv.DictReader(table))

DERIVED_PARTS_OF_SPEECH = {"v. form", "num.", "phrase", "prep. form", "v. def.", "v. refl."}
OWNED = re.compile(r"(my|thy|his|her|our|your|their)\b")

# Words of listed sentences that are not lexicon entries and that nothing generates: their verbs are not
# recorded (to stand on, to go there), spelled in two ways (to give), or occur only once here (coming to me).
UNMADE_WORDS = {"awahaŋ", "wai", "maku", "mayaku", "mau", "maŋke"}

# The maker of each form, and the form, from the record.
with (Path(__file__).parent / "forms.csv").open(encoding="utf-8", newline="") as table:
    FORMS = [(row["kind"], row["of"].split(), row["form"]) for row in csv.DictReader(table)]


def forms(kind):
    return pytest.mark.parametrize(("of", "form"), [row[1:] for row in FORMS if row[0] == kind])


@pytest.fixture(scope="module")
def makers():
    """Return the forms of each maker, for everything that can be listed."""
    made = defaultdict(set)
    for name, family in FAMILIES.items():
        if family.recorded is None:
            continue
        for question in family.recorded():
            if question.answer != NUMBER:
                made[f"{name} {question.facts[-1]}"].update(question.accept)
    for verb in CORPUS.verbs:
        for person in verb.persons:
            made[f"conjugate {fact(verb, person)}"].update(conjugate(verb, person))
    for number in range(1, 10_000):
        made[f"numeral {number}"].update(numeral(number))
    for number in ORDINAL_TAILS:
        made[f"ordinal {number}"].update(ordinal(number))
        made[f"fraction {number}"].update(fraction(number))
    made.update({f"only {number}": {only(number)} for number in RESTRICTED})
    made.update({f"distributive {number}": {form} for number, form in DISTRIBUTIVES.items()})
    made.update(
        {f"contracted {word}": {contract(word)} for word in LEXICON if can_contract(word) and " " not in word}
    )
    return made


def recorded_words():
    spellings = [entry.form for entry in CORPUS.entries]
    spellings += [attested for group in CORPUS.variants.values() for attested, _ in group]
    spellings += [example["dakota"] for rule in CORPUS.rules.values() for example in rule["examples"]]
    return {strip_diacritics(word) for spelling in spellings for word in canonical(spelling).split()}


def test_the_table_lists_every_attested_form_once():
    """The table must list every example of a rule, and every lexicon entry that a rule derives."""
    examples = {canonical(e["dakota"]) for rule in CORPUS.rules.values() for e in rule["examples"]}
    derived = {
        canonical(entry.form)
        for entry in CORPUS.entries
        if entry.pos in DERIVED_PARTS_OF_SPEECH or (entry.pos == "n." and OWNED.match(entry.gloss))
    }
    listed = [row["form"] for row in ATTESTED]
    assert set(listed) == examples | derived
    assert len(listed) == len(set(listed)) > 390


def test_attested_form_is_generated_as_listed_or_not_at_all(makers):
    all_made = set().union(*makers.values())
    for row in ATTESTED:
        assert bool(row["made by"]) != bool(row["reason"]), row
        if row["made by"]:
            assert row["form"] in makers[row["made by"]], row
        else:
            assert row["form"] not in all_made, row
    assert sum(bool(row["made by"]) for row in ATTESTED) > 240


def test_the_words_of_every_other_sentence_are_made_or_in_the_lexicon(makers):
    known = LEXICON | {word for forms in makers.values() for form in forms for word in form.split()}
    sentences = [row["form"] for row in ATTESTED if row["reason"].startswith("sentence")]
    assert len(sentences) > 40
    assert {word for form in sentences for word in form.split()} - known == UNMADE_WORDS


@pytest.mark.parametrize("verb", CORPUS.verbs, ids=lambda verb: f"{verb.lemma}-{verb.klass}")
def test_every_attested_verb_form_is_reproduced(verb):
    for person, form in verb.attested:
        assert form in conjugate(verb, person)


@pytest.mark.parametrize("noun", CORPUS.nouns, ids=lambda noun: noun.lemma)
def test_every_attested_owned_form_is_reproduced(noun):
    for person, form in noun.attested:
        assert form in possess(noun, person)


def test_attested_forms_are_in_the_record_and_the_rest_is_licensed_by_a_rule():
    recorded = recorded_words()
    for word in (*CORPUS.verbs, *CORPUS.nouns):
        assert all(strip_diacritics(form) in recorded or "uŋštaŋpi" in form for _, form in word.attested), (
            word.lemma
        )
        assert word.evidence
        assert set(word.rules) <= set(CORPUS.rules), word.lemma
        assert word.attested or re.match(r"[A-Z]+-\d\d: |the object marker", word.evidence), word.lemma


@forms("cardinal")
def test_every_attested_cardinal_is_accepted(of, form):
    assert form in numeral(int(*of))


def test_numeral_form_means_one_number():
    seen = {}
    for number in range(1, 10_000):
        for form in numeral(number):
            assert seen.setdefault(form, number) == number
            assert canonical(form) == form


def test_unresolved_we_finish_accepts_both():
    assert set(conjugate(VERBS["yuštaŋ", "II"], "1pl")) == {"uŋštaŋpi", "uŋyuštaŋpi"}


@forms("object")
def test_attested_forms_with_an_object(of, form):
    lemma, subject, obj = of
    (verb,) = (verb for verb in CORPUS.verbs if verb.lemma == lemma)
    assert (subject, obj) in object_pairs(verb)
    assert with_object(verb, subject, obj) == form


def test_plural_stands_once_and_them_is_not_marked_by_it():
    verb = VERBS["kaška", "I"]
    assert with_object(verb, "3sg", "2pl") == with_object(verb, "3pl", "2pl") == "nikaškapi"
    assert with_object(verb, "3sg", "3pl") == "wićakaška"
    assert with_object(verb, "2pl", "3pl") == "wićayakaškapi"
    assert with_object(verb, "1sg", "2pl") == "ćićaškapi"


def test_unrecorded_object_forms_are_not_licensed():
    between_us = {("1pl", "2sg"), ("2sg", "1pl"), ("12", "2sg")}
    assert not between_us & set(object_pairs(VERBS["kaška", "I"]))
    assert {subject for subject, _ in object_pairs(VERBS["yuza", "II"])} == {"3sg", "3pl"}
    assert ("3sg", "1pl") not in object_pairs(VERBS["yuza", "II"])


def test_verbs_made_of_verbs():
    kaga, baksa, yuha = VERBS["kaġa", "I"], VERBS["baksa", "I"], VERBS["yuha", "II"]
    assert dative(kaga).lemma == "kićaġa"
    assert conjugate(dative(kaga), "2sg") == ("yećaġa",)
    assert benefactive(kaga).lemma == "kićićaġa"
    assert benefactive(VERBS["kaksa", "I"]).lemma == "kićićaksa"
    assert benefactive(baksa).lemma == "bakićiksa"
    assert possessive(yuha).lemma == "hduha"
    assert possessive(baksa).lemma == "bakiksa"
    assert possessive(VERBS["waštedaka", "I"]).lemma == "waštekidaka"
    assert conjugate(absolute(VERBS["manoŋ", "I"]), "1sg") == ("wamawanoŋ",)
    assert causative(VERBS["mani", "I"], "ya").lemma == "maniya"
    assert causative(VERBS["ećoŋ", "unknown"], "kiya").lemma == "ećoŋkiya"
    assert conjugate(causative(VERBS["mani", "I"], "ya"), "1sg") == ("maniwaya",)


@forms("reflexive")
def test_reflexives(of, form):
    lemma, klass, person = of
    assert reflexive(VERBS[lemma, klass], person) == form


def test_words_are_contracted_as_recorded_and_no_others():
    for word, short in {
        "waŋyaka": "waŋyag",
        "topa": "tom",
        "noŋpa": "nom",
        "opa": "om",
        "yuza": "yus",
    }.items():
        assert contract(word) == short
    for word in ("kute", "yuha", "paḣta", "kaška"):
        assert not can_contract(word)
        with pytest.raises(ValueError, match="not recorded"):
            contract(word)


def test_particles_change_the_final_vowel_only_where_recorded():
    assert with_particle("mduha", "changes", "šni") == ("mduhe šni",)
    assert with_particle("mawanoŋ", "keeps", "kta") == ("mawanoŋ kta",)
    assert set(with_particle("wakaška", "either", "kta")) == {"wakaška kta", "wakaške kta"}
    with pytest.raises(ValueError, match="not recorded"):
        with_particle("wakaġa", "unknown", "kta")


@pytest.mark.parametrize("number", [0, -1, 10_000])
def test_numbers_outside_the_range_are_refused(number):
    with pytest.raises(ValueError, match=str(number)):
        numeral(number)
