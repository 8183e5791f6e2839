"""What the plan of a run says, beside what it has taken."""

import json

import numpy as np
from packages.ui.tests.made import make_run
from safetensors.numpy import save_file

from buckeye_ui.forecast import forecast
from buckeye_ui.sources import OpenRun

CONFIG = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 300, "num_attention_heads": 2}


def rows(path):
    told = forecast(OpenRun("run", path))
    assert told["missing"] is None
    return {one["what"]: one for one in told["rows"]}


def planned_run(place):
    """A run of four steps with the settings and the weights that it would have."""
    path = make_run(place, tokens=False)
    settings = {
        "max_steps": 4,
        "model": {"name": "somebody/not-here"},
        "trainer": {"model": {"device": "cpu"}},
        "inference": {"model": {"device": "cpu"}},
        "orchestrator": {"batch_size": 8, "env": [{"id": "sums"}]},
    }
    (path / "configs" / "rl.json").write_text(json.dumps(settings))
    (path / "weights" / "step_1").mkdir(parents=True)
    model = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 128}
    (path / "weights" / "step_1" / "config.json").write_text(json.dumps({**CONFIG, **model}))
    save_file({"a": np.zeros((10, 25), np.float32)}, path / "weights" / "step_1" / "model.safetensors")
    with (path / "metrics.jsonl").open("a") as metrics:
        for step, peak in ((2, 0.5), (3, 0.25)):
            record = {"time": 1.7e9, "process": "trainer", "step": step, "peak_memory_gib": peak}
            metrics.write(json.dumps(record) + "\n")
    return path


def test_disk_and_memory_are_compared_with_the_plan(tmp_path):
    path = planned_run(tmp_path / "run")
    found = rows(path)
    logs = found["disk: logs"]
    own = [path / "metrics.jsonl", path / "events.jsonl", *(path / "logs").rglob("*.*")]
    assert (logs["planned"], logs["at_most"]) == (4 * 6000, True)
    assert logs["measured"] == sum(file.stat().st_size for file in own if file.is_file())
    weights = found["disk: weights"]
    assert weights["measured"] == sum(file.stat().st_size for file in (path / "weights/step_1").iterdir())
    memory = found["memory: trainer, main memory"]
    assert memory["measured"] == 2**29
    assert memory["planned"] > 10**8


def test_memory_of_another_machine_is_not_compared(tmp_path):
    path = planned_run(tmp_path / "run")
    record = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**record, "host": "elsewhere"}))
    assert not any(what.startswith("memory") for what in rows(path))


def test_why_nothing_is_compared_is_said(tmp_path, ask):
    assert ask("forecast")["missing"] is None
    path = planned_run(tmp_path / "run")
    (path / "configs" / "rl.json").write_text('{"max_stepz": 4}')
    told = forecast(OpenRun("run", path))
    assert (told["rows"], "max_stepz" in told["missing"]) == ([], True)
    (path / "configs" / "rl.json").unlink()
    assert forecast(OpenRun("run", path)) == {"rows": [], "missing": "its settings are not recorded"}
