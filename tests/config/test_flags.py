import pytest

from buckeye.config.buffer import OnlineDifficultyBufferConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import SGDConfig, TrainerConfig


@pytest.mark.parametrize(
    "words",
    [
        "--max-steps 7",
        "--max_steps 7",
        "--max-steps=7",
        "--max_steps=7",
        "--max-steps 3 --max-steps 7",
    ],
)
def test_flag_forms_are_equivalent(load, words):
    assert load(TrainerConfig, words).max_steps == 7


def test_dashes_in_values_are_kept(load):
    config = load(TrainerConfig, "--output_dir=my_dir-1", "--model.name", "a_b-c=d")
    assert str(config.output_dir) == "my_dir-1"
    assert config.model.name == "a_b-c=d"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--clean", True),
        ("--no-clean", False),
        ("--clean false", False),
        ("--clean=False", False),
        ("--clean true", True),
        ("--no-clean --clean", True),
        ("--clean --max-steps 3", True),
        ("--no_clean", False),
    ],
)
def test_switches(load_run, words, expected):
    assert load_run(words).clean is expected


@pytest.mark.parametrize(
    "words",
    [
        ["--inference-gpu-ids", "0,1,2"],
        ["--inference-gpu-ids", "[0,1,2]"],
        ["--inference-gpu-ids", "[0, 1, 2]"],
        ["--inference-gpu-ids", "0, 1, 2"],
        ["--inference-gpu-ids=0,1,2"],
        ["--inference-gpu-ids", "0", "--inference_gpu_ids", "1,2"],
    ],
)
def test_lists(load_run, words):
    config = load_run(*words, "--trainer-gpu-ids", "3")
    assert config.inference_gpu_ids == [0, 1, 2]
    assert config.inference.parallel.dp == 3


def test_a_text_where_a_list_is_meant(load):
    words = ("--client.base-url", "http://a:1/v1", "--client.base-url", "http://b:2/v1")
    assert load(OrchestratorConfig, *words).client.base_url == ["http://a:1/v1", "http://b:2/v1"]
    assert load(OrchestratorConfig, *words[:2]).client.base_url == ["http://a:1/v1"]


def test_dotted_flag_enables_its_section(load):
    assert load(TrainerConfig, "--ckpt.interval 7").ckpt.interval == 7
    assert load(TrainerConfig, "--ckpt --ckpt.keep 2").ckpt.keep == 2
    assert load(TrainerConfig, "--ckpt.keep 2 --ckpt").ckpt.keep == 2


def test_sections_as_json(load):
    config = load(TrainerConfig, "--ckpt", '{"interval": 7}', "--ckpt.keep", "2")
    assert (config.ckpt.interval, config.ckpt.keep) == (7, 2)
    config = load(TrainerConfig, '--optim={"type": "sgd", "momentum": 0.5}', "--seed=1")
    assert config.optim == SGDConfig(momentum=0.5)


def test_lists_of_sections(load):
    config = load(OrchestratorConfig, "--env", '[{"id": "a", "args": {"n": 1}}, {"id": "b"}]')
    assert [(env.id, env.args) for env in config.env] == [("a", {"n": 1}), ("b", {})]
    config = load(OrchestratorConfig, "--env.1.id b --env.1.ratio 3 --env.0.id a --env.1.args.max-turns 2")
    assert [(env.id, env.ratio, env.args) for env in config.env] == [("a", 1, {}), ("b", 3, {"max_turns": 2})]
    config = load(OrchestratorConfig, "--env", '{"id": "a"}', "--env", '{"id": "b"}', "--env.0.name", "A")
    assert [(env.id, env.name) for env in config.env] == [("a", "A"), ("b", None)]


def test_one_item_of_a_list_from_a_file(load, folder):
    folder.write("orch.toml", '[[env]]\nid = "a"\nratio = 2.0\n[[env]]\nid = "b"\n')
    config = load(OrchestratorConfig, "@ orch.toml --env.0.name first --env.2.id c")
    assert [(env.id, env.name, env.ratio) for env in config.env] == [
        ("a", "first", 2.0),
        ("b", None, 1.0),
        ("c", None, 1.0),
    ]


def test_free_tables(load):
    words = ["--env.0.args.a", "1", "--env.0.args.b", "x", "--env.0.args.c", "[1, 2]", "--env.0.args.d=None"]
    args = load(OrchestratorConfig, *words, "--env.0.args.e.f", "true").env[0].args
    assert args == {"a": 1, "b": "x", "c": [1, 2], "d": None, "e": {"f": True}}


@pytest.mark.parametrize("none", ["None", "null"])
def test_none(load, none):
    assert load(OrchestratorConfig, f"--max-steps {none}").max_steps is None
    assert load(OrchestratorConfig, f"--advantage {none}").advantage is None
    assert load(OrchestratorConfig, f"--advantage={none}").advantage is None
    assert load(TrainerConfig, f"--optim.max-norm {none}").optim.max_norm is None


def test_negative_numbers_are_values(load):
    assert load(TrainerConfig, "--ckpt.resume-step -1 --seed -5").ckpt.resume_step == -1
    assert load(OrchestratorConfig, "--eval.num-examples -1").eval.num_examples == -1


def test_variants_of_a_section(load):
    assert load(TrainerConfig, "--optim.lr 3e-6").optim.type == "adamw"
    assert load(TrainerConfig, "--optim.momentum 0.5 --optim.type sgd").optim == SGDConfig(momentum=0.5)
    assert load(TrainerConfig, "--scheduler.type linear --scheduler.decay 3").scheduler.decay == 3
    buffer = load(OrchestratorConfig, "--buffer.type online-difficulty").buffer
    assert isinstance(buffer, OnlineDifficultyBufferConfig)
    assert (buffer.min_reward, buffer.max_reward) == (0.01, 0.99)
    assert load(OrchestratorConfig, "--buffer.online-difficulty-filtering").buffer.online_difficulty_filtering


@pytest.mark.parametrize("reference", ["@ f.toml", "@f.toml", "--max-steps 3 @ f.toml"])
def test_a_file_for_everything(load, folder, reference):
    folder.write("f.toml", 'output_dir = "x"')
    assert str(load(TrainerConfig, reference).output_dir) == "x"


@pytest.mark.parametrize("reference", ["--trainer.model @ m.toml", "--trainer.model @m.toml"])
def test_a_file_for_a_section(load_run, folder, reference):
    folder.write("m.toml", 'name = "m"')
    assert load_run(reference).inference.model.name == "m"


def test_files_are_merged_and_flags_override_them(load, folder):
    folder.write("a.toml", "[trainer]\nmax_steps = 5\n[trainer.optim]\nlr = 1.0\nweight_decay = 2.0\n")
    folder.write("b.toml", "optim = {lr = 3.0}\nseed = 4\n")
    config = load(RLConfig, "@ a.toml --trainer.seed 9 --trainer @ b.toml --orchestrator")
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay) == (3.0, 2.0)
    assert (config.trainer.seed, config.orchestrator.max_steps) == (9, 5)
