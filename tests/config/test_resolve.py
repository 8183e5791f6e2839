import json

import pytest

from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.resolve_run import SECTIONS, SHARED
from buckeye.config.rl import RLConfig
from buckeye.config.settings import dotted, flag_of
from buckeye.config.structure import paths_of, shape_at
from buckeye.config.trainer import TrainerConfig

ROLES = {"trainer": TrainerConfig, "orchestrator": OrchestratorConfig, "inference": InferenceConfig}
SETTABLE = [tuple(name.split(".")) for name in SHARED]


def _other_value(path):
    """Return a value that no setting has by default."""
    shape, default = shape_at(RLConfig, path), _value(RLConfig().trainer, path)
    if shape.is_flag or default is True:
        return not default
    if shape.choices:
        return next(choice for choice in reversed(shape.choices) if choice != default)
    if path[-1] == "store":
        return "s3://bucket/other"
    return "other" if str in shape.scalars or not shape.bounds else 3177


def _value(config, path):
    for name in path:
        config = getattr(config, name, None)
    return str(config) if path[-1] == "output_dir" else config


def _nested(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


def _words(path, value):
    return f"{flag_of(path)}={json.dumps(value) if not isinstance(value, str) else value}"


def _assert_arrives(config, path, value):
    for role in SHARED[dotted(path)]:
        assert _value(getattr(config, role), path) == value, f"{role} was not told"


def test_shared_table_matches_the_classes():
    shared, sections = {}, {}
    for path in dict.fromkeys(paths_of(RLConfig)):
        having = tuple(role for role, model in ROLES.items() if shape_at(model, path) is not None)
        if path[0] in ROLES or not having:
            continue
        shape = shape_at(TrainerConfig, path)
        if not shape.tables:
            shared[dotted(path)] = having
        elif shape.optional:
            sections[dotted(path)] = having
    assert shared == dict(SHARED)
    assert sections == dict(SECTIONS)


@pytest.mark.parametrize("path", SETTABLE, ids=flag_of)
def test_shared_setting_reaches_every_process_from_flag_or_file(load_run, load, folder, path):
    value = _other_value(path)
    _assert_arrives(load_run(_words(path, value)), path, value)
    processes = {role: {} for role in ROLES}
    folder.write("run.json", json.dumps(processes | _nested(path, value)))
    _assert_arrives(load(RLConfig, "@ run.json"), path, value)
    if path[0] != "log":  # each process may have another one
        folder.write("one.json", json.dumps(processes | {"orchestrator": _nested(path, value)}))
        _assert_arrives(load(RLConfig, "@ one.json"), path, value)


@pytest.mark.parametrize("path", SETTABLE, ids=flag_of)
def test_shared_setting_that_differs_in_a_process_is_refused(load, refused, folder, path, wording):
    """Only log settings may differ: the value of the process is kept."""
    value, own = _other_value(path), _value(RLConfig().trainer, path)
    if own is None:
        own = f"{value}-third" if isinstance(value, str) else 2
    if path == ("seq_len",):
        own = 4000
    given = {"trainer": _nested(path, own), "orchestrator": {}, **_nested(path, value)}
    folder.write("run.json", json.dumps(given))
    if path[0] == "log":
        config = load(RLConfig, "@ run.json")
        assert (_value(config.trainer, path), _value(config.orchestrator, path)) == (own, value)
        return
    assert refused(RLConfig, "@ run.json") == wording


@pytest.mark.parametrize("name", SECTIONS)
def test_a_shared_section_that_is_off_is_off_for_all(load_run, name):
    path = tuple(name.split("."))
    words = ["--trainer", "--orchestrator", *([flag_of(path[:-1])] if path[1:] else [])]
    config = load_run(*words, f"{flag_of(path)}=None")
    assert [_value(getattr(config, role), path) for role in SECTIONS[name]] == [None] * 2


@pytest.mark.parametrize("owner", ["", "trainer.", "orchestrator.", "inference."])
def test_model_and_output_directory(load_run, owner):
    config = load_run(f"--{owner}model.name m --{owner}output-dir out")
    for role in (config.trainer, config.orchestrator, config.inference):
        assert (role.model.name, str(role.output_dir)) == ("m", "out")
    assert str(config.output_dir) == "out"


@pytest.mark.parametrize(
    ("words", "interval", "keep"),
    [
        ("", 10, 3),
        ("--ckpt.keep 2", 10, 2),
        ("--trainer.ckpt.keep 2", 10, 2),
        ("--ckpt --orchestrator.ckpt.interval 7", 7, 3),
        ("--ckpt.interval None", None, 3),
        ("--trainer.ckpt.interval None --ckpt.keep None", None, None),
    ],
)
def test_checkpoints_are_on_by_default(load_run, words, interval, keep):
    config = load_run(words)
    for role in (config.trainer, config.orchestrator):
        assert (role.ckpt.interval, role.ckpt.keep) == (interval, keep)


@pytest.mark.parametrize("words", ["--ckpt None", "--trainer.ckpt None", "--orchestrator.ckpt None"])
def test_checkpoints_can_be_off(load, load_run, folder, words):
    config = load_run(words)
    assert config.trainer.ckpt is config.orchestrator.ckpt is None
    folder.write("on.toml", "[trainer.ckpt]\nkeep = 9\n[orchestrator]\n")
    assert load(RLConfig, "@ on.toml --ckpt None").trainer.ckpt is None


def test_process_section_overrides_none_of_the_run(load, folder):
    folder.write("run.json", '{"ckpt": null, "trainer": {"ckpt": {"interval": 3}}, "orchestrator": {}}')
    config = load(RLConfig, "@ run.json")
    assert config.trainer.ckpt.interval == config.orchestrator.ckpt.interval == 3


@pytest.mark.parametrize("words", ["--resume", "--resume --ckpt.resume-step -1", "--ckpt.resume-step -1"])
def test_resume(load_run, words):
    config = load_run(words)
    assert config.trainer.ckpt.resume_step == config.orchestrator.ckpt.resume_step == -1


def test_resume_turns_on_the_checkpoints_of_a_file(load, refused, folder, wording):
    """The resolved configuration of a run without checkpoints has `null`, and must still be resumable."""
    off = '"ckpt": null, "trainer": {"ckpt": null}, "orchestrator": {"ckpt": null}'
    folder.write("rl.json", f"{{{off}}}")
    config = load(RLConfig, "@ rl.json --resume")
    assert config.trainer.ckpt.resume_step == config.orchestrator.ckpt.resume_step == -1
    assert config.ckpt is None  # no interval is invented either
    folder.write("both.json", f'{{"resume": true, {off}}}')
    assert refused(RLConfig, "@ both.json") == wording


def test_run_flag_overrides_files_of_processes(load, folder):
    folder.write("t.toml", 'max_steps = 9\noutput_dir = "a"\n[model]\nname = "m"\n[ckpt]\nresume_step = 3\n')
    folder.write("o.toml", 'max_steps = 8\nseq_len = 99\n[model]\nname = "n"\n')
    words = "--trainer @ t.toml --orchestrator @ o.toml --max-steps 5 --model.name k --output-dir b"
    config = load(RLConfig, f"{words} --seq-len 77 --resume")
    assert config.trainer.max_steps == config.orchestrator.max_steps == 5
    assert config.trainer.model.name == config.orchestrator.model.name == "k"
    assert str(config.trainer.output_dir) == str(config.orchestrator.output_dir) == "b"
    assert config.trainer.seq_len == config.orchestrator.seq_len == 77
    assert config.trainer.ckpt.resume_step == config.orchestrator.ckpt.resume_step == -1


@pytest.mark.parametrize(
    ("in_trainer", "in_orchestrator"),
    [
        ("max_steps = 9", "max_steps = 8"),
        ('output_dir = "a"', 'output_dir = "b"'),
        ("ckpt.resume_step = 2", "ckpt.resume_step = -1"),
        ('wandb.name = "a"', 'wandb.name = "b"'),
    ],
)
def test_different_values_in_processes_are_refused_with_both_locations(
    refused, folder, in_trainer, in_orchestrator, wording
):
    folder.write("t.toml", f"\n{in_trainer}\n")
    folder.write("o.toml", f"\n\n{in_orchestrator}\n")
    assert refused(RLConfig, "--trainer @ t.toml --orchestrator @ o.toml") == wording


def test_equivalent_values_are_accepted(load_run):
    words = "--trainer.output-dir a/ --orchestrator.output-dir ./a --output-dir a"
    assert str(load_run(words).output_dir) == "a"


def test_section_that_is_off_in_one_process_is_refused(refused, folder, wording):
    folder.write("t.json", '{"ckpt": null}')
    folder.write("o.json", '{"ckpt": {"interval": 3}}')
    assert refused(RLConfig, "--trainer @ t.json --orchestrator @ o.json") == wording


def test_all_processes_are_one_wandb_run(load_run):
    config = load_run("--wandb.name n --wandb.offline --wandb.id abc --wandb.log-extras.interval 3")
    assert config.trainer.wandb == config.orchestrator.wandb == config.wandb
    config = load_run("--trainer.wandb.name t --orchestrator.wandb.id abc")
    assert config.trainer.wandb == config.orchestrator.wandb
    assert (config.trainer.wandb.name, config.trainer.wandb.id) == ("t", "abc")
    config = load_run("--trainer.wandb --orchestrator.wandb.log-extras None")
    assert config.trainer.wandb.log_extras is None


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("--trainer", True),
        ("--trainer.seed 3", True),
        ("--trainer --orchestrator --model.name m --max-model-len 3 --inference-gpu-ids 0,1", True),
        ("--orchestrator.client.timeout 9", True),
        ("--inference None", False),
        ("--no-inference", False),
        ("--no-inference --trainer.optim.lr 1e-5", False),
        ("--orchestrator.client.base-url http://h/v1", False),
        ("--orchestrator.client.base-url http://h/v1 --trainer.seed 3", False),
    ],
)
def test_run_starts_servers_unless_they_are_elsewhere(load, words, starts):
    assert (load(RLConfig, words).inference is not None) == starts


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("--ckpt.keep 3 --no-ckpt", "trainer.ckpt"),
        ("--orchestrator.eval.interval 3 --no-orchestrator.eval", "orchestrator.eval"),
        ("--wandb --no-wandb", "trainer.wandb"),
        (
            "--trainer.model.experimental.lora.rank 8 --no-trainer.model.experimental.lora",
            "trainer.model.experimental.lora",
        ),
    ],
)
def test_no_and_the_name_of_an_optional_section_turns_it_off(load, words, section):
    value = load(RLConfig, words)
    for name in section.split("."):
        value = getattr(value, name)
    assert value is None


def test_no_and_the_name_of_a_required_section_is_refused(refused):
    assert "--no-trainer" in refused(RLConfig, "--no-trainer")


@pytest.mark.parametrize(
    ("words", "inference", "trainer", "dp"),
    [
        ("", [0], [1], 1),
        ("--inference-gpu-ids 0,1,2", [0, 1, 2], [3], 3),
        ("--inference-gpu-ids 2,3", [2, 3], [1], 2),
        ("--inference.parallel.dp 3", [0, 1, 2], [3], 3),
        ("--inference-gpu-ids 0 --trainer-gpu-ids 0", [0], [0], 1),
        ("--trainer.model.tp 2 --trainer.model.dp-replicate 2", [0], [1, 2, 3, 4], 1),
        ("--trainer.model.tp 2 --inference-gpu-ids 0,1,2", [0, 1, 2], [3, 4], 3),
    ],
)
def test_devices(load_run, words, inference, trainer, dp):
    config = load_run(words)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (inference, trainer)
    assert config.inference.parallel.dp == dp


@pytest.mark.parametrize(
    "words",
    [
        "--inference-gpu-ids 0,1 --inference.parallel.dp 3",
        "--inference.backend vllm --inference-gpu-ids 0,1,2 --inference.parallel.tp 2",
        "--trainer-gpu-ids 1,2,3 --trainer.model.tp 2",
        "--trainer-gpu-ids 1,1",
        "--trainer.model.sharding none --trainer.model.dp-replicate 2",
        "--orchestrator.seq-len 4096 --trainer.seq-len 2048",
        "--resume --trainer.ckpt.resume-step 5",
    ],
)
def test_conflicting_run_settings_are_refused(refused, words, wording):
    assert refused(RLConfig, f"--trainer --orchestrator --inference {words}") == wording


def test_devices_by_flag_override_replicas_in_a_file(load, folder):
    folder.write("r.toml", "inference.parallel.dp = 3\norchestrator = {}\ntrainer = {}\n")
    assert load(RLConfig, "@ r.toml --inference-gpu-ids 0,1").inference.parallel.dp == 2


def test_rows_may_be_longer(load_run):
    config = load_run("--orchestrator.seq-len 1024 --trainer.seq-len 4096")
    assert (config.trainer.seq_len, config.orchestrator.seq_len) == (4096, 1024)


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        ("--trainer.model.experimental.lora", 16),
        ("--trainer.model.experimental.lora.rank 4", 4),
        ("--trainer.model.experimental.lora.rank 4 --inference.max-lora-rank 64", 64),
        ("", None),
    ],
)
def test_max_lora_rank_is_the_rank_of_trained_adapters(load_run, words, rank):
    assert load_run(words).inference.max_lora_rank == rank


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("", 0.9),
        ("--inference-gpu-ids 0,1 --trainer-gpu-ids 2,3", 0.9),
        ("--trainer-gpu-ids 0", 0.4),
        ("--inference-gpu-ids 0,1 --trainer-gpu-ids 1", 0.4),
        ("--trainer-gpu-ids 0 --inference.gpu-memory-utilization 0.6", 0.6),
    ],
)
def test_gpu_memory_utilization_is_lower_on_a_shared_gpu(load_run, words, share):
    assert load_run(words).inference.gpu_memory_utilization == share
