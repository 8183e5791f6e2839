import unicodedata

import pytest
from environments.dakota1890.tests.second_grader import _spelled, _unmarked
from hypothesis import given
from hypothesis import strategies as st

from dakota1890.corpus import load_corpus
from dakota1890.orthography import ALPHABET, canonical, strip_diacritics

FORMS = sorted({canonical(entry.form) for entry in load_corpus().entries})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("wakaśka", "wakaška"),
        ("wakaṡka", "wakaška"),
        ("Kaǧa", "kaġa"),
        ("kağa", "kaġa"),
        ("oŋȟpa", "oŋḣpa"),
        ("taṇyaṇ", "taŋyaŋ"),
        ("zaniyan\u0304", "zaniyaŋ"),
        ("niṫa", "niṭa"),
        ("wičášta", "wićašta"),
        ("taŋ-yaŋ", "taŋyaŋ"),
        ("waš\u2019aka", "waš'aka"),
        ("wa\u200bka\u00adška", "wakaška"),
        ("  wikćemna \n noŋpa. ", "wikćemna noŋpa"),
        ("nonpa", "nonpa"),
        ("kaska", "kaska"),
    ],
)
def test_variants_fold_and_plain_letters_do_not(written, expected):
    assert canonical(written) == expected


@given(st.sampled_from(FORMS), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]), st.booleans())
def test_any_encoding_of_a_recorded_form_folds_to_it(form, encoding, capital):
    written = unicodedata.normalize(encoding, form)
    assert canonical(written.upper() if capital else written) == form


@given(st.sampled_from(FORMS), st.data())
def test_stress_never_matters(form, data):
    vowels = [i for i, char in enumerate(form) if char in "aeiou"]
    if vowels:
        i = data.draw(st.sampled_from(vowels))
        assert canonical(form[: i + 1] + "\u0301" + form[i + 1 :]) == form


@given(st.text())
def test_folding_is_idempotent_and_never_fails(text):
    once = canonical(text)
    assert canonical(once) == once


@given(st.text() | st.text(alphabet=[*sorted(ALPHABET), *"śǧȟčáŋ\u0301\u030c\u0307\u0304\u200b-’."]))
def test_the_second_grader_spells_the_same(text):
    assert _spelled(text) == canonical(text)
    assert _unmarked(_spelled(text)) == strip_diacritics(canonical(text))


def test_bare_loses_every_mark():
    assert strip_diacritics("uŋkićaġa") == "unkicaga"
    assert strip_diacritics("waš'aka") == "was'aka"
