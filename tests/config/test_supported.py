import re
import tomllib

import pytest

from buckeye.config.inference import InferenceConfig
from buckeye.config.load import help_text, load_with_warnings
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.settings import flag_of
from buckeye.config.sft import ChatDataConfig, SFTConfig
from buckeye.config.structure import all_classes, paths_of
from buckeye.config.supported import RULES, check_supported
from buckeye.config.trainer import TrainerConfig

DEFAULTS = {
    TrainerConfig: TrainerConfig(),
    SFTConfig: SFTConfig(data=ChatDataConfig(path="chats.jsonl")),
    OrchestratorConfig: OrchestratorConfig(),
    InferenceConfig: InferenceConfig(),
}


@pytest.mark.parametrize("model", RULES, ids=lambda model: model.__name__)
def test_rules_are_about_settings_that_exist(model):
    roots = (model, TrainerConfig) if model is SFTConfig else (model,)
    known = {".".join(map(str, path)) for root in roots for path in paths_of(root)}
    assert {rule.path for rule in RULES[model]} <= known


@pytest.mark.parametrize("config", DEFAULTS.values(), ids=lambda config: type(config).__name__)
def test_defaults_are_supported(config):
    assert [p for p in check_supported(config) if p.path != ("rollouts_per_example",)] == []


@pytest.mark.parametrize(
    "words",
    [
        "--model.cp 2",
        "--model.tp 2 --model.experimental.lora",
        "--ckpt.weights.save-adapter-separately",
        "--model.debug.num-layers 2",
        "--data.fake",
        "--bench",
        "--weights.interval 10",
        "--weights.save-format torch",
        "--trace-path t",
    ],
)
def test_what_a_trainer_refuses(refused, words):
    flag = words.split()[0]
    assert refused(TrainerConfig, words).startswith(flag)


@pytest.mark.parametrize(
    "words",
    [
        "--buffer.easy-fraction 0.5",
        "--buffer.type difficulty-pool",
        "--buffer.type online-difficulty --buffer.oversampling-factor 2",
        "--no-mask-env-responses",
        "--sampling.repetition-penalty 1.1",
        "--client.headers.X-Key a",
        "--client.server-type openai",
        "--eval.save.hf",
        "--eval.sampling.min-p 0.1",
        "--ckpt.buffer-path b",
    ],
)
def test_what_an_orchestrator_refuses(refused, words):
    assert "problems" not in refused(OrchestratorConfig, words)


@pytest.mark.parametrize("words", ["--parallel.tp 2", "--vllm.max-num-seqs 3"])
def test_what_the_embedded_engine_refuses_and_vllm_takes(refused, words):
    assert refused(InferenceConfig, words).startswith(words.split()[0])
    assert not _warnings(InferenceConfig, f"--backend vllm {words}")


def _warnings(model, words):
    return load_with_warnings(model, words.split(), {})[1]


RUN = "--trainer --orchestrator --inference --orchestrator.rollouts-per-example 8"


def test_what_is_only_said():
    words = "--trainer.model.ep 2 --weight-broadcast.type nccl --trainer.model.impl custom"
    said = [warning.partition(": ")[0] for warning in _warnings(RLConfig, f"{RUN} {words}")]
    assert sorted(said) == [
        "--trainer.model.ep",
        "--trainer.model.impl",
        "--weight-broadcast.type",
    ]


def test_vllm_has_no_modules_that_are_trained_in_full(refused):
    words = f"{RUN} --trainer.model.experimental.lora.modules-to-save norm"
    assert _warnings(RLConfig, words) == []
    assert "vLLM's adapters are low-rank only" in refused(RLConfig, f"{words} --inference.backend vllm")


def test_a_run_without_inference_says_where_it_expects_servers():
    (warning,) = _warnings(RLConfig, RUN.replace("--inference", ""))
    assert "http://localhost:8000/v1" in warning


def test_what_is_implemented_is_silent():
    words = """--trainer.optim.type muon --trainer.scheduler.type cosine --trainer.loss.ratio-type sequence
        --trainer.loss.ratio-length-norm --trainer.loss.kl-tau 0.1 --trainer.loss.kl-mask-type masked
        --trainer.model.experimental.lora.rank 8 --trainer.ckpt.weights.save-adapter-separately
        --trainer.model.fsdp-cpu-offload --no-trainer.model.reshard-after-forward
        --trainer.model.reduce-dtype bfloat16 --trainer.model.dp-replicate 2
        --trainer.model.ac --trainer.model.compile --trainer-gpu-ids 1,2 --inference.parallel.dp 2
        --inference-gpu-ids 3,4 --orchestrator.eval --orchestrator.val --orchestrator.zero-spread drop
        --orchestrator.buffer.online-difficulty-filtering --ckpt.keep 2 --ckpt.resume-step 4
        --trainer.ckpt.skip-progress --trainer.ckpt.skip-scheduler --trainer.ckpt.skip-dataloader
        --orchestrator.advantage.std-norm global --wandb --orchestrator.oversampling-factor 1.5"""
    assert _warnings(RLConfig, f"{RUN} {words}") == []


def test_a_group_of_one_learns_nothing():
    (warning,) = _warnings(OrchestratorConfig, "--rollouts-per-example 1")
    assert warning.startswith("--rollouts-per-example: is 1: a rollout without siblings")
    assert _warnings(OrchestratorConfig, "--rollouts-per-example 4") == []
    assert _warnings(OrchestratorConfig, "--advantage None") == []


@pytest.mark.parametrize("model", [*RULES, RLConfig], ids=lambda model: model.__name__)
def test_help_marks_what_is_not_built(model):
    """Whoever reads of a setting is told before it is refused."""
    lines = {line.split()[0]: line for line in help_text(model, "x").splitlines() if line.startswith("  --")}
    roles = {"trainer": TrainerConfig, "orchestrator": OrchestratorConfig, "inference": InferenceConfig}
    parts = {f"{name}.": part for name, part in roles.items()} if model is RLConfig else {"": model}
    for prefix, part in parts.items():
        for rule in RULES[part]:
            line = lines.get(flag_of(f"{prefix}{rule.path}".split(".")))
            if line is not None and not rule.path.endswith("type"):  # of a section, or one of several kinds
                assert rule.message in line
    if model is RLConfig:
        assert "Other values are refused: there is no benchmark mode" in lines["--bench"]
        assert "Taken, but: weights travel as files" in lines["--weight-broadcast.type"]
    assert "Other values" not in lines.get("--trainer.optim.lr", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trainer.loss.type DAPO", "Did you mean dapo"),
        ("--orchestrator.advantage.type rloo", "leave_one_out = true"),
        ("--trainer.loss grpo", "To choose its kind, write --trainer.loss.type grpo"),
        ("--trainer.loss.type gspu", "Did you mean gspo?"),
    ],
)
def test_names_of_elsewhere_are_translated(refused, words, said):
    assert said in refused(RLConfig, f"{RUN} {words}")


def test_what_a_translation_says_is_accepted(load, folder):
    """Every setting that it names exists, with that value."""
    for model in all_classes(RLConfig):
        for words in model.known_as.values():
            own = re.split(", and in|; or", words)[0]
            values = tomllib.loads(
                "\n".join(re.findall(r"\w+ = (?:\{.*?\}|[^ ,;]+)", own.replace("C - 1", "4.0")))
            )
            assert model.model_validate(values)
