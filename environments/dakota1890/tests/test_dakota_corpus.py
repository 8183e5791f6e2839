"""The packaged record is complete and sourced, and its known misreadings are not used."""

import json
from importlib import resources

import pytest

from dakota1890 import corpus as corpus_module
from dakota1890.corpus import CorpusError, load_corpus
from dakota1890.families import FAMILIES
from dakota1890.orthography import canonical

CORPUS = load_corpus()


def test_every_entry_has_a_source():
    assert len(CORPUS.entries) == 751
    assert len(CORPUS.rules) == 119
    assert all(entry.source for entry in CORPUS.entries)
    assert all(entry.note for entry in CORPUS.entries if entry.status != "sound")
    assert all(rule["source"] for rule in CORPUS.rules.values())
    assert len(CORPUS.content_hash) == 64


def test_every_canonical_spelling_is_canonical_and_every_spelling_variant_folds_to_it():
    for entry in CORPUS.entries:
        assert canonical(entry.form) == entry.form.lower().strip("-")
    for form, group in CORPUS.variants.items():
        for attested, kind in group:
            assert (canonical(attested) == canonical(form)) == (kind == "spelling"), (form, attested)


def test_an_altered_file_is_refused(tmp_path, monkeypatch):
    source = resources.files("dakota1890") / "data"
    copy = tmp_path / "data"
    copy.mkdir()
    for name in ["manifest.json", *json.loads((source / "manifest.json").read_text())["files"]]:
        (copy / name).write_bytes((source / name).read_bytes())
    (copy / "rules.json").write_text("[]")
    monkeypatch.setattr(corpus_module.resources, "files", lambda _: tmp_path)
    with pytest.raises(CorpusError, match=r"rules\.json"):
        load_corpus.__wrapped__()


def test_misread_forms_are_not_asked_for():
    misread = {
        canonical(attested)
        for group in CORPUS.variants.values()
        for attested, kind in group
        if kind == "misread"
    }
    recorded = [family.recorded() for family in FAMILIES.values() if family.recorded]
    assert not misread & {
        form for questions in recorded for question in questions for form in question.accept
    }
