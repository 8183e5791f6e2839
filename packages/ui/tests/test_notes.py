"""Tags and notes: the only thing that is written, and nothing of it is lost."""

import json

import pytest
from packages.ui.tests.made import HOSTILE, make_run
from starlette.testclient import TestClient

from buckeye_ui.server import create_app
from buckeye_ui.sources import Sources


@pytest.fixture
def noted(tmp_path):
    make_run(tmp_path / "run", steps=1, tokens=False)
    with TestClient(create_app(Sources(str(tmp_path))), base_url="http://127.0.0.1:8420") as client:
        yield client, tmp_path / "run" / "notes.json"


def test_a_note_is_kept_beside_the_run(noted):
    client, file = noted
    for note in ({"tags": ["baseline"]}, {"of": "train/0/0/1", "text": HOSTILE}):
        assert client.put("/api/runs/run/notes", json=note).status_code == 200
    assert client.get("/api/runs/run/notes").json()["notes"] == json.loads(file.read_text())
    assert client.get("/api/runs").json()["runs"][0]["tags"] == ["baseline"]
    assert client.put("/api/runs/run/notes", json={"of": "", "text": " "}).json()["notes"] == [
        {"of": "train/0/0/1", "text": HOSTILE, "tags": []}
    ]


@pytest.mark.parametrize(
    ("note", "status"),
    [
        ({"tags": "x"}, 422),
        ({"tags": [""]}, 422),
        ({"text": "x" * 20_001}, 422),
        ({"text": "x" * 70_000}, 413),
        ({"who": "x"}, 422),
    ],
)
def test_what_is_no_note_is_refused(noted, note, status):
    client, file = noted
    assert client.put("/api/runs/run/notes", json=note).status_code == status
    assert not file.exists()


def test_notes_of_others_are_not_overwritten(noted):
    client, file = noted
    file.write_text("by hand: hello")
    answer = client.put("/api/runs/run/notes", json={"text": "mine"})
    assert answer.status_code == 404
    assert "cannot be read" in answer.json()["error"]
    assert file.read_text() == "by hand: hello"


def test_another_site_can_note_nothing(noted):
    client, file = noted
    for headers in ({"Origin": "http://elsewhere.example"}, {"Content-Type": "text/plain"}):
        sent = client.put("/api/runs/run/notes", content=b'{"text": "x"}', headers=headers)
        assert sent.status_code in (403, 415)
    assert not file.exists()
