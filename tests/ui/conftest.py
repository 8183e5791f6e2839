"""A recorded run, the page's API for it, and a browser."""

import pytest
from starlette.testclient import TestClient

from buckeye.ui.run_catalog import RunCatalog
from buckeye.ui.server import create_app
from tests.ui.browsing import browsing
from tests.ui.made import make_run
from tests.waiting import HANG


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Directory with the run `one`, which tests do not change."""
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "one")
    return place


@pytest.fixture
def client(folder):
    with TestClient(create_app(RunCatalog(str(folder))), base_url="http://127.0.0.1:8420") as found:
        yield found


@pytest.fixture
def ask(client):
    """Return a function that requests data of the run `one` and returns the JSON answer."""

    def asked(question, **given):
        answer = client.get(f"/api/runs/one/{question}", params=given)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return asked


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api")
    with browsing() as found:
        yield found


@pytest.fixture
def opened(browser):
    """Return a function that opens an address in a new window; console errors fail the test at its end."""
    contexts, said = [], []

    def go(address, **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.set_default_timeout(HANG * 1000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        page.wait_for_selector("main:not([aria-busy]) .page")
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == []
