"""A recorded run, and the page's interface to it."""

import pytest
from packages.ui.tests.made import make_run
from starlette.testclient import TestClient

from buckeye_ui.server import create_app
from buckeye_ui.sources import Sources


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A directory with the run `one`, which tests leave as it is."""
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "one")
    return place


@pytest.fixture
def client(folder):
    with TestClient(create_app(Sources(str(folder))), base_url="http://127.0.0.1:8420") as found:
        yield found


@pytest.fixture
def ask(client):
    """The answer to a question about the run `one`."""

    def asked(question, **given):
        answer = client.get(f"/api/runs/one/{question}", params=given)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return asked
