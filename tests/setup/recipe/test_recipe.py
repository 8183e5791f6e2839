"""A run's configuration from its parts."""

from pathlib import Path

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError, UsageError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.mcp.config import GymConfig
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.setup.recipe.compose import Recipe, config_text
from buckeye.setup.recipe.environment import describe_mcp
from buckeye.setup.recipe.model import SUGGESTED, ModelFacts, model_facts, refuse_hosted
from buckeye.setup.recipe.sizes import choose_sizes, default_learning_rate
from buckeye.setup.recipe.training_machine import plan_gpus

GYM = GymConfig.model_validate(
    {
        "system_prompt": "x" * 300,
        "parser": {"use_thinking": False},
        "action_mappings": {"go": {"_tool": "go"}},
        "defaults": {"max_turns": 2},
    }
)


def tasks(count, prompt="p" * 90):
    server = {"s": {"command": "server"}}
    return [
        McpTask(id=f"t{i}", prompt=prompt, mcp_config=server, evaluate_tool={"name": "evaluate"})
        for i in range(count)
    ]


def model(parameters=600_000_000, positions=4096):
    return ModelFacts(name="org/m", path=None, parameters=parameters, positions=positions)


def environment(train, held_out=(), gym=GYM):
    file = Path("configs/e.yaml")
    return describe_mcp(gym, train, held_out, file=file, dataset="tasks.json")


def sizes_of(train, gym, facts, **options):
    return choose_sizes(environment(train, gym=gym), facts, **options)


def recipe(count=16, held_out=(), layout=None, facts=None):
    facts, described = facts or model(), environment(tasks(count), held_out)
    return Recipe(
        environment=described,
        model=facts,
        sizes=choose_sizes(described, facts, on_gpu=layout is not None),
        layout=layout,
        output_dir=Path("outputs/e"),
    )


def loaded(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    return load_config(RLConfig, ["@", str(tmp_path / "run.toml")])


def test_sizes_follow_the_tasks_the_prompts_and_the_turns():
    sizes = sizes_of(tasks(16), GYM, model(), on_gpu=False)
    assert (sizes.groups, sizes.batch_size) == (4, 32)
    assert sizes.prompt_tokens == 32 + 100 + 30  # for the template, 300 and 90 characters
    assert sizes.seq_len == 640  # 162 and twice 128 + 96 make 610
    assert sizes.max_tokens == 128
    assert sizes.max_steps == 20  # three passes over 16 tasks would be 12
    assert sizes_of(tasks(3), GYM, model(), on_gpu=True).groups == 3
    assert sizes_of(tasks(600), GYM, model(), on_gpu=True).max_steps == 113  # 1800 tasks by 16


def test_prompt_longer_than_the_context_is_refused(refusal):
    with refusal(UsageError):
        sizes_of(tasks(1, "p" * 3090), GYM, model(positions=1024), on_gpu=False)


def gym(max_turns):
    return GYM.model_copy(update={"defaults": GYM.defaults.model_copy(update={"max_turns": max_turns})})


def test_seq_len_grows_with_descriptions_and_accepts_a_request(refusal):
    described, facts = tasks(16, "p" * 9000), model(positions=8192)
    usual = sizes_of(described, gym(100), facts, on_gpu=False)
    assert usual.prompt_tokens == 32 + 100 + 3000
    assert usual.seq_len == 4032  # four turns of 128 + 96 after 3132, not 2048
    asked = sizes_of(described, gym(100), facts, on_gpu=False, requested_seq_len=3300)
    assert (asked.seq_len, asked.max_tokens) == (3300, 128)
    assert sizes_of(tasks(16), gym(30), facts, on_gpu=False).seq_len == 6912  # 162 and 30 times 224
    assert sizes_of(tasks(16), gym(100), facts, on_gpu=False).seq_len == 2048
    with refusal(UsageError):
        sizes_of(described, gym(30), facts, on_gpu=False, requested_seq_len=3000)


def test_config_text_is_valid_and_flags_override_it(tmp_path, refusal):
    made = recipe(held_out=tasks(50))
    config = loaded(config_text(made), tmp_path)
    assert config.orchestrator.env[0].args == {"dataset": "tasks.json", "config_path": "configs/e.yaml"}
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (32, 8)
    assert config.trainer.max_steps == config.orchestrator.max_steps == 20
    assert config.orchestrator.eval.interval == 20
    assert config.orchestrator.eval.num_examples == 32
    assert config.trainer.model.name == config.inference.model.name == "org/m"

    text = config_text(
        made, ["--max-steps", "7", "--trainer.optim.type", "muon", "--no-inference.model.enforce-eager"]
    )
    changed = loaded(text, tmp_path)
    assert (changed.trainer.max_steps, changed.orchestrator.eval.interval) == (7, 7)
    assert changed.trainer.optim.type == "muon"
    assert (
        loaded(config_text(made, ["--orchestrator.eval.interval", "5"]), tmp_path).orchestrator.eval.interval
        == 5
    )
    with refusal(ConfigError):
        config_text(made, ["--max-stepz", "7"])
    with refusal(UsageError):
        config_text(made, ["--orchestrator.env.0.args.x", "None"])


def test_config_text_contains_gpus_and_adapters(tmp_path):
    facts = model(8_000_000_000)
    config = loaded(
        config_text(recipe(layout=plan_gpus(GpuSpec(2), facts.parameters), facts=facts)), tmp_path
    )
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0], [1])
    assert config.trainer.model.experimental.lora is not None
    assert config.trainer.optim.lr == 1e-5 == default_learning_rate(facts.parameters, lora=True)
    assert config.orchestrator.batch_size == 128


def test_a_gguf_file_is_imported_first(tmp_path):
    (tmp_path / "Small.Q4_0.gguf").touch()
    with pytest.raises(UsageError) as error:
        model_facts(str(tmp_path / "Small.Q4_0.gguf"))
    assert error.value.code == "BK-MODEL-NOT-FOUND"
    assert "buckeye model import" in error.value.hint


@pytest.mark.parametrize(
    ("name", "parameters", "guessed"),
    [
        ("Qwen/Qwen3-0.6B", 600_000_000, False),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135_000_000, False),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_000_000_000, False),
        ("org/model", 1_000_000_000, True),
    ],
)
def test_model_facts_reads_the_size_from_the_name(name, parameters, guessed):
    facts = model_facts(name)
    assert (facts.parameters, facts.is_estimated) == (parameters, guessed)


@pytest.mark.parametrize("name", ["gpt-4o-mini", "openai/o3", "claude-sonnet-4-5", "google/gemini-2.5-pro"])
def test_models_without_public_weights_are_refused(name, refusal):
    with refusal(UsageError):
        refuse_hosted(name)


def test_models_whose_weights_are_published_are_not_refused():
    published = ("openai/gpt-oss-20b", "gpt2", "EleutherAI/gpt-j-6b", "google/gemma-3-1b-it")
    for name in (*published, *(name for name, _ in SUGGESTED)):
        refuse_hosted(name)


def test_none_is_written_as_text(tmp_path):
    words = ["--max-steps", "None", "--orchestrator.eval", "None", "--wandb.log-extras", "None"]
    config = loaded(config_text(recipe(held_out=tasks(6)), words), tmp_path)
    assert (config.max_steps, config.orchestrator.eval, config.wandb.log_extras) == (None, None, None)
