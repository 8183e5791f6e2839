"""Configurations of runs that an earlier version started."""

import json

import pytest

from buckeye.config.load import load_with_warnings, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import changed_settings, record_config
from buckeye.launch.preflight.turns import choose_colocation

REMOVED = {
    "bench": False,
    "weight_broadcast": {"type": "nccl"},
    "log": {"level": "info", "vf_level": "warn", "file": True},
    "trainer": {"model": {"cp": 1, "ep": 1, "debug": {"num_layers": None}}, "data": {"fake": None}},
    "orchestrator": {
        "buffer": {"type": "simple", "easy_fraction": 0.0, "seed": None},
        "num_train_workers": 1,
        "env": [{"id": "e", "gone": 1}],
    },
}


def _merged(values, more):
    if isinstance(values, dict) and isinstance(more, dict):
        return {key: _merged(values.get(key), more.get(key, values.get(key))) for key in {**values, **more}}
    if isinstance(values, list) and isinstance(more, list):
        return [_merged(value, other) for value, other in zip(values, more, strict=True)]
    return values if more is None else more


def test_recorded_configuration_with_removed_settings_is_loaded(load, folder, refused):
    words = ["--trainer", "--orchestrator", "--inference", "--orchestrator.env.0.id", "e"]
    config = load(RLConfig, *words)
    old = json.dumps(_merged(json.loads(to_json(config)), REMOVED))
    folder.write("run/configs/rl.json", old)
    assert load_with_warnings(RLConfig, ["@", "run/configs/rl.json"])[0] == config
    folder.write("mine.json", old)  # a user's own file: an unknown setting is an error
    assert "mine.json:" in refused(RLConfig, "@ mine.json")


def test_removed_settings_are_not_changes_of_a_run(load, folder):
    words = ["--trainer", "--orchestrator", "--inference", "--output-dir", "run"]
    config = load(RLConfig, *words)
    record_config(config)
    path = folder.path / "run" / "configs" / "rl.json"
    path.write_text(json.dumps(_merged(json.loads(path.read_text()), {"bench": True, "log": {"file": True}})))
    assert changed_settings(config.output_dir, config) == []
    assert changed_settings(config.output_dir, load(RLConfig, *words, "--seq-len", "99"))


def test_model_that_was_moved_is_not_a_change_of_a_run(load, folder):
    folder.write("mine/config.json", "{}")
    words = ["--trainer", "--orchestrator", "--inference", "--output-dir", "run", "--model.name", "mine"]
    record_config(load(RLConfig, *words))
    (folder.path / "mine").rename(folder.path / "other")
    config = load(RLConfig, *words)
    assert changed_settings(config.output_dir, config) == []
    other = load(RLConfig, *words[:-1], "other")
    assert changed_settings(config.output_dir, other)


@pytest.mark.parametrize("gpus", [[], [0], [0, 1]])
def test_choices_of_the_launcher_are_not_changes_of_a_run(load, folder, gpus):
    words = ["--trainer", "--orchestrator", "--inference", "--output-dir", "run"]
    config = load(RLConfig, *words)
    chosen = choose_colocation(config, gpus)
    if chosen.colocate:
        cache = {"kv_cache_gb": 9.5, "gpu_memory_utilization": 0.5}
        update = {"colocate_offload": "weights", "inference": chosen.inference.model_copy(update=cache)}
        chosen = chosen.model_copy(update=update)
    assert chosen.colocate is (len(gpus) == 1)
    record_config(chosen)
    assert changed_settings(config.output_dir, config) == []
    other = changed_settings(config.output_dir, load(RLConfig, *words, "--colocate", "false"))
    assert ("colocate: true -> false" in other) is (len(gpus) == 1)
    longer = load(RLConfig, *words, "--trainer.optim.lr", "1e-3")
    assert changed_settings(config.output_dir, longer) == ["trainer.optim.lr: 1e-06 -> 0.001"]


def test_kv_cache_that_the_launcher_chose_next_to_a_trainer_is_not_a_change(load, folder):
    words = ["--trainer", "--orchestrator", "--inference", "--output-dir", "run", "--colocate", "false"]
    config = load(RLConfig, *words, "--trainer-gpu-ids", "0")
    cache = {"inference": config.inference.model_copy(update={"kv_cache_gb": 9.5})}
    record_config(config.model_copy(update=cache))
    assert changed_settings(config.output_dir, config) == []
    assert changed_settings(config.output_dir, load(RLConfig, *words, "--trainer-gpu-ids", "1"))


@pytest.mark.parametrize("damaged", [None, [{}], 5])
def test_damaged_record_of_gpus_is_a_change(load, folder, damaged):
    config = load(RLConfig, "--trainer", "--orchestrator", "--inference", "--output-dir", "run")
    record_config(config)
    path = folder.path / "run" / "configs" / "rl.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inference_gpu_ids": damaged}))
    assert changed_settings(config.output_dir, config)
