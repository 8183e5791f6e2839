"""Every bash and toml block of the training guide has its documented effect, on CPU slots."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.places import ROOT
from tests.workers.installed.package_index import serving

from buckeye.base.distribution import DISTRIBUTION
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

from .blocks import Workspace, blocks

pytestmark = pytest.mark.e2e

BASH = blocks("bash")
TOML = blocks("toml")
NAMES = ("train", "orch", "infer")
CONFIGS = "configs/dakota_grammar_gym/rl"
RUN = "outputs/dakota-v12-1000steps"


def block(*words):
    """Return the only bash block that contains all the words."""
    (found,) = [b for b in BASH if all(w in b for w in words)]
    return found


LAUNCHES = [b for b in BASH if "uv run rl" in b]
LAUNCH_8 = next(b for b in LAUNCHES if "ckpt" not in b and "0,1,2,3,4,5" in b)
LAUNCH_2 = next(b for b in LAUNCHES if "--inference-gpu-ids 0 " in b)
LAUNCH_CKPT = next(b for b in LAUNCHES if "ckpt.interval" in b)
RESUME_LATEST = next(b for b in LAUNCHES if "resume-step -1" in b)
RESUME_STEP = next(b for b in LAUNCHES if "resume-step 500" in b)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    texts = ['Dakota verb "kaška" (bind). Put only the form in <answer></answer>.'] * 20
    size = TinySize(vocab_size=320, layers=1, hidden=64, max_length=512)
    make_tiny_model(path, texts=texts, size=size, seed=0)
    generation = json.loads((path / "generation_config.json").read_text())
    ends = [generation["eos_token_id"], *range(100, 200)]  # end replies of random tokens early
    (path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": ends}))
    return path


@pytest.fixture(scope="module")
def ws(tmp_path_factory, model):
    """Workspace with the guide's configuration files."""
    workspace = Workspace(tmp_path_factory.mktemp("guide"), model)
    workspace.run(block("mkdir -p configs"))
    for name, text in zip(NAMES, TOML, strict=False):
        (workspace.root / CONFIGS / f"{name}.toml").write_text(workspace.text(text))
    return workspace


def steps_trained(ws):
    records = [json.loads(line) for line in (ws.root / RUN / "metrics.jsonl").read_text().splitlines()]
    return [r["step"] for r in records if r["process"] == "trainer"]


def put_away(ws):
    """Empty the run directory, because alternatives in the guide share it."""
    if (ws.root / RUN).exists():
        shutil.rmtree(ws.root / RUN)


def on_two(launch):
    """Return a launch on the devices of the guide's smaller one, which takes a third of the time."""
    return launch.replace("0,1,2,3,4,5", "0").replace("6,7", "1").replace("parallel.dp 6", "parallel.dp 1")


def test_every_block_is_used_below():
    assert len(BASH) == 24
    assert len(TOML) == 4
    assert len(LAUNCHES) == 5


def test_setting_up(ws):
    ws.run(block("ssh -i"))
    ws.run(next(b for b in BASH if b.strip() == "cd /workspace/prime-rl"))
    ws.run(block("uv tool install prime"))
    for b in (b for b in BASH if "uv pip install dakota1890" in b):
        ws.run(b)
    assert "ssh -i /path/to/your/private_key root@127.0.0.1 -p 22" in ws.calls()
    assert "prime env install harleycooper/dakota1890" in ws.calls()


@pytest.mark.slow
def test_option_b_and_the_verification_line_as_printed(ws, tmp_path):
    """Installed next to Buckeye from an index with this checkout's wheel, and with the real `verifiers`."""
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    uv = Path(sys.executable).with_name("uv")
    project = ROOT / "environments" / "dakota1890"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", wheels, project], check=True)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    python = venv / "bin" / "python"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, "-e", f"{ROOT}[mcp,hub]"], check=True
    )
    real = {"REAL_UV": "pip", "VIRTUAL_ENV": str(venv), "UV_PROJECT_ENVIRONMENT": str(venv)}
    option_b = next(b for b in BASH if "uv pip install dakota1890" in b)
    with serving(wheels) as (index, _):
        ws.run(option_b.replace("https://hub.primeintellect.ai/harleycooper/simple/", index), **real)
    assert "✓ Environment loaded successfully" in ws.run(block("uv run python -c"), **real)
    assert "Would make no changes" in ws.run(f"uv pip install --dry-run '{DISTRIBUTION}[mcp,hub]'", **real)


@pytest.mark.slow
def test_the_configuration_also_as_printed(ws):
    """The unchanged file with the published model's name is accepted and resolved; nothing is written."""
    directory = ws.root / "as-printed"
    (directory / CONFIGS).mkdir(parents=True)
    for name, text in zip(NAMES, TOML, strict=False):
        (directory / CONFIGS / f"{name}.toml").write_text(text)
    for launch in LAUNCHES:
        command = launch[launch.index("uv run rl") :] + " --dry-run"
        for words, shown in (("", "trainer 0"), (" --json", '"max_steps": 1000')):
            done = subprocess.run(
                ["bash", "-c", command + words],
                cwd=directory,
                env=ws.env,
                capture_output=True,
                text=True,
                check=False,
            )
            has_nothing_to_resume = "resume-step" in launch
            assert done.returncode == (2 if has_nothing_to_resume else 0), done.stderr
            assert ("no committed checkpoint" in done.stderr) == has_nothing_to_resume
            assert shown in done.stdout
    assert not (directory / "outputs").exists()


@pytest.mark.slow
def test_launch_with_8_devices(ws):
    put_away(ws)
    printed = ws.run(LAUNCH_8)
    assert "Starting inference process on CPU slot(s) 0 1 2 3 4 5" in printed
    assert "Starting trainer process on CPU slot(s) 6 7" in printed
    assert "RL training finished!" in printed
    assert steps_trained(ws) == [0, 1, 2]
    logs = {p.name for p in (ws.root / RUN / "logs").iterdir()}
    assert {"inference.stdout", "inference_5.stdout", "trainer_1.stdout", "run.log"} <= logs
    check_orchestrator(ws)


def check_orchestrator(ws):
    """Assert that the orchestrator's log has the lines that the guide looks for."""
    orchestrator = (ws.root / RUN / "logs" / "orchestrator.stdout").read_text()
    for line in (
        r"INFO Starting orchestrator step 1",
        r"INFO Waiting for weight checkpoint 0",
        r"INFO Updating weights to weight checkpoint [12]",  # the first may already be outdated
        r"SUCCESS Step 1 \| Time: \d+\.\d\ds \| Reward: -?\d\.\d{4} \| Throughput: \d+\.\d tokens/s"
        r" \| Seq\. Length: \d+\.\d tokens/sample",
    ):
        assert re.search(line, orchestrator), line


def test_launch_with_2_devices_and_watching_it(ws):
    put_away(ws)
    printed = ws.run(LAUNCH_2)
    assert "Starting inference process on CPU slot(s) 0\n" in printed
    assert "Starting trainer process on CPU slot(s) 1\n" in printed
    assert "RL training finished!" in printed
    assert steps_trained(ws) == [0, 1, 2]
    check_orchestrator(ws)
    tail = block("tail -f").replace("tail -f", "timeout 2 tail -f")
    assert "SUCCESS Step 2" in ws.run(tail, expect=124)  # of the last lines; earlier ones may be warnings
    ws.run(block("watch -n 1 nvidia-smi"), expect=None)
    assert "step_3" in ws.run(block("ls -la outputs"))


def test_looking_at_the_disk(ws):
    assert "step_3" in ws.run(block("du -h /workspace", "head -20"), expect=None)
    assert "weights" in ws.run(block("watch -n 30"))
    monitor = block("monitor_disk.sh").replace("/tmp/monitor_disk.sh\n", "/tmp/monitor_disk.sh\n", 1)
    before, _, start = ws.text(monitor).rpartition("\n")
    assert "Disk Space Monitor" in ws.run(f"{before}\ntimeout 2 bash {start}", expect=124)


def test_checkpointing(ws):
    put_away(ws)
    ws.run(on_two(LAUNCH_CKPT))
    listed = ws.run(block("List available checkpoint steps"))
    assert listed.split() == ["1", "2", "3"]


def test_checkpointing_from_the_files(ws):
    for name in ("train", "orch"):
        path = ws.root / CONFIGS / f"{name}.toml"
        path.with_name(f"{name}-ckpt.toml").write_text(path.read_text() + "\n" + ws.text(TOML[3]))
    launch = LAUNCH_8.replace("train.toml", "train-ckpt.toml").replace("orch.toml", "orch-ckpt.toml")
    printed = ws.run(launch.replace("--output-dir outputs/dakota-v12-1000steps", "--dry-run --json"))
    assert '"interval": 1' in printed
    assert '"keep": 3' in printed


def test_resuming_from_the_latest_checkpoint(ws):
    ws.set_steps(4)
    ws.run(on_two(RESUME_LATEST))
    assert steps_trained(ws) == [0, 1, 2, 3]
    assert resumed(ws, 3)


def resumed(ws, step):
    orchestrator = (ws.root / RUN / "logs" / "orchestrator.stdout").read_text()
    return f"Resuming training from checkpoint step `{step}`" in orchestrator


@pytest.mark.slow
def test_resuming_from_a_step(ws):
    ws.run(on_two(RESUME_STEP))
    assert steps_trained(ws) == [0, 1, 2, 3, 2, 3]


def test_the_recovery_checklist(ws):
    server = ws.start_server()
    try:
        assert "buckeye serve @ inference.toml" in ws.run(block("ps aux"))
    finally:
        server.terminate()
        assert server.wait() == 0
    ws.run(f"! ps -p {server.pid}")
    assert "%" in ws.run(next(b for b in BASH if b.strip() == "df -h /"))
    assert "step_" in ws.run(block("ls -1t"))
    assert "SUCCESS" in ws.run(block("tail -100"))


def test_cleaning_up_by_hand(ws):
    checkpoints = ws.root / RUN / "checkpoints"
    for step in (7, 8, 9):
        shutil.copytree(checkpoints / "step_2", checkpoints / f"step_{step}")
    ws.run(block("Keep only the 3 most recent checkpoints", "rm -rf"))
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_7", "step_8", "step_9"]


@pytest.mark.slow
def test_checkpoints_with_8_devices(ws):
    put_away(ws)
    ws.set_steps(3)
    ws.run(LAUNCH_CKPT)
    ws.set_steps(4)
    ws.run(RESUME_LATEST)
    assert resumed(ws, 3)
    ws.run(RESUME_STEP)
    assert steps_trained(ws) == [0, 1, 2, 3, 2, 3]


def test_the_unquoted_string_of_the_troubleshooting_section(ws):
    path = ws.root / "unquoted.toml"
    path.write_text("max_steps = 2\n\n[model]\nname = Qwen/Qwen3-0.6B\n")
    printed = ws.run(LAUNCH_2.replace("configs/dakota_grammar_gym/rl/train.toml", str(path)), expect=2)
    assert f"{path}:4" in printed or "line 4" in printed
    assert 'name = "Qwen/Qwen3-0.6B"' in printed
    assert "^" in printed
    assert "Traceback" not in printed
