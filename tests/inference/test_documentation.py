"""The examples of docs/how-to/serve.md work as printed."""

import re
from pathlib import Path

from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_with_warnings

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


def test_the_code_of_the_page_runs(server, chat_model, capsys):
    (code,) = blocks("python")
    code = code.replace("http://127.0.0.1:8000", server.url).replace("choose-one", server.key)
    code = code.replace("Qwen/Qwen3-0.6B", str(chat_model.directory))
    code = code.replace("import OpenAI\n", "import OpenAI\nimport httpx\n")
    code = code.replace(f'"{server.key}")', f'"{server.key}", http_client=httpx.Client(trust_env=False))')
    exec(compile(code, "docs/how-to/serve.md", "exec"), {})
    assert re.search(r" \d+$", capsys.readouterr().out, re.M)


def test_the_configurations_of_the_page_are_accepted(tmp_path):
    for number, text in enumerate(blocks("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        config, warnings = load_with_warnings(InferenceConfig, ["@", str(file)])
        assert config.model.name == "Qwen/Qwen3-0.6B"
        assert not warnings
