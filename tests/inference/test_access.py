"""Access rules of an inference server against web pages, other users and clients without the key."""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from buckeye.inference.access import PUBLIC_ROUTES

from .conftest import KEY_VARIABLE, LocalServer
from .test_server import post

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": "[::1]"}, 200),
        ({"Host": "LocalHost:1"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
    ],
)
def test_requests_with_another_host_or_origin_are_refused(http, headers, status):
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/resume")):
        assert http.request(method, path, headers=headers).status_code == status, (method, path)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_body_that_is_not_declared_as_json_is_refused(http, kind):
    headers = {"content-type": kind} if kind else {}
    answer = http.post("/start_weight_update", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def test_request_without_the_key_gets_liveness_only(http, server):
    paths = http.get("/openapi.json").json()["paths"]
    asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    with httpx.Client(base_url=server.url, trust_env=False) as stranger:
        for method, path in [*asked, ("GET", "/openapi.json"), ("GET", "/nothing")]:
            answer = stranger.request(method, path.replace("{model}", "x"), content=b"{}", headers=JSON)
            assert answer.status_code == (200 if path == "/health" else 401), (method, path)
        assert stranger.get("/health").content == b""


def test_key_is_generated_in_a_private_file_and_not_logged(chat_model, tmp_path, caplog):
    caplog.set_level("INFO")
    with LocalServer(chat_model.directory, tmp_path, key=None) as server:
        (made,) = (tmp_path / "home" / "servers").iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
        with server.http() as http:
            assert http.get("/v1/models").status_code == 401
            key = {"Authorization": f"Bearer {made.read_text()}"}
            assert http.get("/v1/models", headers=key).status_code == 200
        assert made.read_text() not in caplog.text
        assert str(made) in caplog.text
    assert not made.exists()


@pytest.mark.parametrize("settings", [{"key": None}, {"key": "chosen"}, {"key": None, "no_key": True}])
def test_logged_export_line_connects_a_client(chat_model, tmp_path, caplog, settings):
    caplog.set_level("INFO")
    with LocalServer(chat_model.directory, tmp_path, **settings):
        exports, name = re.search(r"Clients: (export .*)  # model (.*)", caplog.text).groups()
        shell = f'{exports}; printf "%s %s" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
        environment = {**os.environ, KEY_VARIABLE: settings["key"] or ""}
        url, key = subprocess.check_output(["sh", "-c", shell], text=True, env=environment).split()
        assert "/" not in name
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}, trust_env=False) as http:
            listed = {model["id"] for model in http.get(f"{url}/models").json()["data"]}
            assert listed == {name, str(chat_model.directory)}
            assert http.post(f"{url}/chat/completions", json={"model": name, **CHAT}).status_code == 200


def test_server_without_a_key_serves_public_routes_only(chat_model, tmp_path):
    with LocalServer(chat_model.directory, tmp_path, key=None, no_key=True) as server, server.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code in (200, 404)
        for path, methods in http.get("/openapi.json").json()["paths"].items():
            public = any(path == one or path.startswith(f"{one}/") for one in PUBLIC_ROUTES)
            for method in methods:
                answer = http.request(method, path.replace("{model}", "x"), content=b"{}", headers=JSON)
                assert (answer.status_code == 403) is not public, (method, path, answer.text)


@pytest.mark.parametrize(
    "kind", ["outside", "link", "pipe as manifest", "pipe as weights", "path in manifest"]
)
def test_weights_outside_of_the_folder_are_refused(http, server, chat_model, kind):
    below = chat_model.directory.parent / f"hostile-{kind.replace(' ', '-')}"
    target = Path(tempfile.mkdtemp()) if kind == "outside" else below
    target.mkdir(exist_ok=True)
    if kind == "link":
        (target / "model.safetensors").symlink_to("/etc/passwd")
    elif kind == "pipe as manifest":
        os.mkfifo(target / "manifest.json")
    elif kind == "pipe as weights":
        os.mkfifo(target / "model.safetensors")
    elif kind == "path in manifest":
        (target / "manifest.json").write_text(
            '{"run_id": "r", "attempt": 1, "step": 1, "dtype": "float32", "checksum": "0", '
            '"files": {"../../../../etc/passwd": "0"}}'
        )
    try:
        post(http, "/start_weight_update")
        refused = http.post("/update_weights", json={"update_info": {"path": str(target)}})
        assert refused.status_code == 400
        said = refused.json()["error"]["message"]
        expected = {"outside": "is not in", "link": "a link", "path in manifest": "is not a file name"}
        assert expected.get(kind, "a pipe") in said
        adapter = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(target)})
        assert adapter.status_code == 400
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_page_in_allowed_origins_is_admitted(chat_model, tmp_path):
    page = "http://localhost:3000"
    listed = {"allowed_origins": [page], "allowed_hosts": ["gpu.example"]}
    with LocalServer(chat_model.directory, tmp_path, server=listed) as server, server.http() as http:
        before = http.options("/v1/models", headers={"Origin": page, "Authorization": ""})
        assert before.status_code == 204
        answer = http.get("/v1/models", headers={"Origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert http.get("/v1/models", headers={"Origin": f"{page}0"}).status_code == 403
        assert http.get("/v1/models", headers={"Host": "gpu.example:8000"}).status_code == 200
