"""Clients that are served, headers of the answers, and refusals."""

import json
import shutil
from unittest import mock

import httpx
import pytest
from starlette.testclient import TestClient

from buckeye.errors import UsageError
from buckeye.ui import STATIC
from buckeye.ui.endpoints import ENDPOINTS
from buckeye.ui.run_catalog import RunCatalog
from buckeye.ui.server import create_app
from tests.command import run_here
from tests.ui.browsing import serving
from tests.ui.made import make_run
from tests.waiting import HANG


def test_all_of_the_page_is_of_its_own_server(client):
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    for source in STATIC.rglob("*"):
        if source.suffix in (".js", ".css", ".html") and source.parent.name != "vendor":
            text = source.read_text(encoding="utf-8")
            assert "innerHTML" not in text, source
            assert " style=" not in text, source
            assert "https://" not in text, source
    for line in page.text.splitlines():
        for part in line.split('"')[1::2]:
            if part.startswith("static/"):
                assert client.get(f"/{part}").status_code == 200, part


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/..%2fserver.py", "/static/nothing.js", "/x"]
)
def test_nothing_beside_the_page_is_served(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example"}, 403),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8420"}, 200),
        ({"Host": "localhost:8420"}, 200),
    ],
)
def test_who_may_ask(client, headers, status):
    assert client.get("/api/runs", headers=headers).status_code == status


def test_elsewhere_than_on_the_loopback_a_key_is_asked_for(folder):
    app = create_app(RunCatalog(str(folder)), host="0.0.0.0", key="secret")
    with TestClient(app, base_url="http://10.1.2.3:8420") as client:
        assert client.get("/").status_code == 200
        assert client.get("/static/style.css").status_code == 200
        for path in ("/api/runs", "/api/runs/one/status", "/api/live"):
            assert client.get(path).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert client.get("/api/runs", headers=wrong).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert client.get("/api/runs", headers=right).json()["runs"][0]["name"] == "one"


@pytest.mark.parametrize(
    "path", ["two/status", "one/nothing", "one/metrics", "one/status?x=1", "one/metrics?pattern=("]
)
def test_what_cannot_be_asked_is_said(client, path, wording):
    assert client.get(f"/api/runs/{path}").json()["error"] == wording


@pytest.mark.e2e
@pytest.mark.smoke
def test_the_command_serves_a_recorded_run(folder):
    with serving(folder) as base:
        listed = httpx.get(f"{base}api/runs", timeout=HANG).json()
        assert (listed["runs"][0]["name"], listed["only"]) == ("one", None)
        assert httpx.get(f"{base}api/runs/one/overview", timeout=HANG).json()["steps"] == [0, 1, 2, 3]
        assert "<main" in httpx.get(base, timeout=HANG).text


def test_runs_with_the_same_name_are_told_apart(tmp_path):
    for place in ("a", "b"):
        make_run(tmp_path / place / "run", tokens=False)
    sources = RunCatalog(str(tmp_path))
    names = [run.name for run in sources.all()]
    assert len(set(names)) == 2
    assert [run.name for run in sources.all()] == names
    assert sources.find(names[1]).path == tmp_path / "b" / "run"
    assert sources.only is None
    assert RunCatalog(str(tmp_path / "b" / "run")).only == "run"


def test_a_directory_without_a_run_is_refused(tmp_path):
    done = run_here("ui", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    with pytest.raises(UsageError, match="nobody"):
        RunCatalog("nobody-knows-this")


def test_nothing_is_written_but_the_index(tmp_path):
    run = make_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    app = create_app(RunCatalog(str(run)))
    with (
        mock.patch("buckeye.ui.findings._diagnose", return_value={"findings": []}),
        TestClient(app, base_url="http://127.0.0.1") as client,
    ):
        for name, (parameters, _) in ENDPOINTS.items():
            if not parameters.__struct_fields__:
                assert client.get(f"/api/runs/run/{name}").status_code == 200, name
    new = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "index.sqlite"}
    new.pop(run / "rollouts")
    before.pop(run / "rollouts")
    assert new == before


def test_a_run_that_is_gone_or_damaged_is_left_out(tmp_path, wording):
    make_run(tmp_path / "one", tokens=False)
    hurt = make_run(tmp_path / "two", tokens=False)
    (hurt / "status.json").write_text("{")
    (hurt / "metrics.jsonl").write_bytes(b'{"step": "x"}\n\xff\xff\n[[[[\n')
    sources = RunCatalog(str(tmp_path))
    with TestClient(create_app(sources), base_url="http://127.0.0.1") as client:
        states = {one["name"]: one["state"] for one in client.get("/api/runs").json()["runs"]}
        assert states == {"one": "finished", "two": "unknown"}
        assert client.get("/api/runs/two/status").json()["reason"] == wording
        assert client.get("/api/runs/two/overview").json()["steps"] == []
        shutil.rmtree(tmp_path / "one")
        assert [one["name"] for one in client.get("/api/runs").json()["runs"]] == ["two"]


def test_events_say_what_is_new(folder):
    """The event stream of a running run begins with its state and continues with changes."""
    import asyncio

    from buckeye.ui.server import _ApiRoutes

    served = _ApiRoutes(RunCatalog(str(folder)))

    async def first():
        stream = served._events(served._sources.find("one"))
        assert (await anext(stream)).startswith(b":")
        told = await anext(stream)
        await stream.aclose()
        return told

    told = asyncio.run(first()).decode()
    assert set(json.loads(told.split("data: ")[1])) >= {"metrics", "events", "rollouts"}


def test_a_run_whose_launcher_is_gone_says_that_it_was_killed(tmp_path, wording):
    make_run(tmp_path / "one", state="running", tokens=False)
    with TestClient(create_app(RunCatalog(str(tmp_path))), base_url="http://127.0.0.1:8420") as client:
        status = client.get("/api/runs/one/status").json()
    assert (status["state"], status["going_on"]) == ("dead", False)
    assert status["reason"] == wording
