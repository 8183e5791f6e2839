"""What the README shows is accepted as it stands."""

import inspect
import re
import subprocess
import sys

from tests.places import ROOT

from buckeye.config.load import load_config
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.mcp.environment import load_environment

README = ROOT / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.S | re.M)


def test_the_configuration_and_the_environment_of_the_readme(tmp_path):
    train, orch, mcp = blocks("toml")
    (environment,) = blocks("python")
    (tmp_path / "train.toml").write_text(train)
    (tmp_path / "orch.toml").write_text(orch)
    (tmp_path / "infer.toml").write_text("")
    (tmp_path / "capitals.py").write_text(environment)
    command = next(line for b in blocks("bash") for line in b.splitlines() if line.startswith("rl "))
    words = [*command.split()[1:], "--orchestrator.env.0.id", "capitals.py", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "buckeye", "rl", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "mcp.toml").write_text(mcp)
    (env,) = load_config(OrchestratorConfig, ["@", str(tmp_path / "mcp.toml")]).env
    assert env.args.keys() <= inspect.signature(load_environment).parameters.keys()
    assert '"rollouts_per_example": 16' in done.stdout
    assert "capitals" not in done.stderr  # it was found, loaded and satisfies the protocol


def test_files_named_in_the_readme_exist():
    for path in re.findall(r"`(src/[\w/.]+)`", README.read_text(encoding="utf-8")):
        assert (README.parent / path).exists(), path
