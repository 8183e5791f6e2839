"""What docs/inference.md shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_with_warnings

PAGE = (Path(__file__).parents[2] / "docs" / "inference.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


def test_the_code_of_the_page_runs(server, chat_model):
    (code,) = blocks("python")
    code = code.replace("http://127.0.0.1:8000", server.url).replace("choose-one", server.key)
    code = code.replace("Qwen/Qwen3-0.6B", str(chat_model.directory))
    code = code.replace("import OpenAI\n", "import OpenAI\nimport httpx\n")
    code = code.replace(f'"{server.key}")', f'"{server.key}", http_client=httpx.Client(trust_env=False))')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r" \d+$", done.stdout, re.M)


def test_the_configurations_of_the_page_are_accepted(tmp_path):
    for number, text in enumerate(blocks("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        config, warnings = load_with_warnings(InferenceConfig, ["@", str(file)])
        assert config.model.name == "Qwen/Qwen3-0.6B"
        assert not warnings


def test_the_routes_of_the_page_are_those_of_the_server(http):
    served = {*http.get("/openapi.json").json()["paths"], "/openapi.json"}
    named = set(re.findall(r"(?:`|^)(?:(?:GET|POST) +)?(/[\w/.]+)", PAGE, re.M))
    named = {route.replace("NAME", "{model}") for route in named} - {"/v1", "/inference"}
    assert len(named) >= 18
    assert named <= served
