"""A model divided among ranks trains as on one rank: FSDP, replicas, tensor parallelism, resume."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from buckeye.base.faults import FAULTS, FAULTS_DONE
from buckeye.base.process import RunIdentity
from buckeye.config.trainer import ModelConfig
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_model
from buckeye.monitor.metrics import read_run_metrics
from buckeye.trainer.output.checkpoint_export import ComparisonTexts, write_model
from buckeye.trainer.output.state import OPTIMIZER_DIRECTORY
from buckeye.trainer.parallel.shards import can_load_tensors, load_shards
from buckeye.trainer.rl import run_trainer
from buckeye.trainer.setup import _load_policy
from buckeye.trainer.sft import run_sft
from buckeye.transport.batches import Batch, Sample, write_batch
from buckeye.transport.checkpoint import (
    list_checkpoints,
    resolve_checkpoint,
    trainer_state_directory,
    verify_checkpoint,
)
from tests.trainer.ranks import SCRIPT, launch
from tests.trainer.trainer_config import sft_config, trainer_config

ME = RunIdentity(run_id="local", attempt=1)
STEPS = 4
FSDP, TENSOR, REPLICAS, WHOLE = {"sharding": "full"}, {"tp": 2}, {"dp_replicate": 2}, {}
TOLERANCE = {"adamw": 1e-4, "sgd": 1e-4, "muon": 1e-2}  # Muon rounds to bfloat16
SETTINGS = {
    "seq_len": 48,
    "max_steps": STEPS,
    # no token is masked, so rounding cannot change the mask
    "loss": {"mask_ratio_low": 0.0, "mask_ratio_high": 1e9},
}


@pytest.fixture(scope="module")
def uneven_model(build_model) -> Path:
    """Qwen3 whose rows cannot be divided evenly among four ranks."""
    return build_model(Qwen3Config, intermediate_size=46, vocab_size=266)


@pytest.fixture(scope="module")
def batches():
    """Four batches, one without any gradient, and the last with one sample.

    With one sample, all ranks but one have nothing to compute.
    """
    rng = np.random.default_rng(0)

    def sample(step: int, length: int, advantage: float) -> Sample:
        mask = np.arange(length) >= length // 3
        return Sample(
            token_ids=rng.integers(0, 256, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -5.5, 0).astype(np.float32),
            versions=np.where(mask, step, -1).astype(np.int32),
            advantages=np.full(length, advantage, np.float32),
            temperature=1.0,
        )

    counts = [(9, 1.0), (7, 1.0), (3, 0.0), (1, 1.0)]
    return [
        Batch(
            step=step,
            samples=tuple(sample(step, int(n), scale * rng.normal()) for n in rng.integers(3, 40, count)),
            orchestrator_state={"emitted": step},
        )
        for step, (count, scale) in enumerate(counts)
    ]


def train(source: Path, run: Path, batches, *, ranks: int = 1, division=None, attempt: int = 1, **changes):
    for batch in batches:
        write_batch(run / "batches", batch, identity=replace(ME, attempt=attempt))
    config = trainer_config(source, run, **{**SETTINGS, **changes})
    model = ModelConfig(name=str(source), device="cpu", **division or {})
    config = config.model_copy(update={"model": model})
    if ranks == 1:
        run_trainer(config)
        return
    path = run / "config.json"
    path.write_text(config.model_dump_json())
    launch(ranks, str(SCRIPT), str(path), attempt=attempt)


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    (path,) = (run / "weights" / f"step_{step}").glob("*.safetensors")
    return load_file(path)


def stored(run: Path, part: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the complete tensors of the `model` or the `optimizer` of a checkpoint."""
    state = trainer_state_directory(resolve_checkpoint(run / "checkpoints", step))
    if part == "optimizer" and has_shards(state):
        return load_shards(state / OPTIMIZER_DIRECTORY, lambda name: None)
    paths = {"optimizer": "optimizer.safetensors", "model": "model/model.safetensors"}
    return load_file(state / paths[part])


def has_shards(state: Path) -> bool:
    return (state / OPTIMIZER_DIRECTORY).is_dir()


def optimizer(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return stored(run, "optimizer", step)


def records(run: Path, process: str = "trainer"):
    return list(read_run_metrics(run / "metrics.jsonl").of(process).values())


def assert_same_run(one: Path, other: Path, *, tolerance: float = 1e-4, process: str = "trainer") -> None:
    """Assert that two runs have the same losses, weights and optimizer state except for rounding.

    Adam divides a gradient that is only rounding by its own size, so a weight may differ by a tenth of a
    step.
    """
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=1e-3, msg=name)
    assert optimizer(other).keys() == optimizer(one).keys()
    for name, tensor in optimizer(one).items():
        limit = tolerance * float(tensor.abs().max())
        torch.testing.assert_close(optimizer(other)[name], tensor, rtol=0, atol=limit, msg=name)
    for key in ("loss", "grad_norm", "entropy", "trained_tokens", "lr"):
        expected = [pytest.approx(r[key], rel=tolerance) if key in r else None for r in records(one, process)]
        assert [r.get(key) for r in records(other, process)] == expected, key


@pytest.mark.e2e
def test_two_shards_equal_one_rank(tmp_path, tiny_model, batches):
    train(tiny_model, tmp_path / "one", batches)
    two = tmp_path / "two"
    train(tiny_model, two, batches, ranks=2, division={"sharding": "full"})
    assert_same_run(tmp_path / "one", two)
    info = resolve_checkpoint(two / "checkpoints", STEPS)
    assert sum(path.stat().st_size for path in info.path.rglob("*.safetensors")) < 2e6  # nothing twice
    directory = fetch_model(str(trainer_state_directory(info) / "model"))  # chat, evals and others load this
    verify_checkpoint(info)
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(two).items())
    assert AutoTokenizer.from_pretrained(directory).chat_template
    (two / "exported").mkdir()
    assert (
        write_model(
            trainer_state_directory(info), two / "exported", dtype=None, passages=ComparisonTexts()
        ).dtype
        == "float32"
    )


@pytest.mark.slow
def test_resume_after_a_rank_was_killed_during_a_checkpoint(tmp_path, tiny_model, batches, monkeypatch):
    """The other rank commits nothing without it; the run resumes from the previous checkpoint."""
    straight, broken, marks = tmp_path / "straight", tmp_path / "broken", tmp_path / "marks"
    marks.mkdir()
    train(tiny_model, straight, batches)
    monkeypatch.setenv(FAULTS_DONE, str(marks))
    monkeypatch.setenv(FAULTS, "checkpoint.captured=kill@2")  # once in the run, at the first rank there
    with pytest.raises(AssertionError):
        train(tiny_model, broken, batches, ranks=2, division=FSDP, ckpt={"interval": 1})
    assert [info.step for info in list_checkpoints(broken / "checkpoints")] == [1]
    monkeypatch.setenv("BUCKEYE_ATTEMPT", "2")
    ckpt = {"interval": 1, "resume_step": -1}
    train(tiny_model, broken, batches[1:], ranks=2, division=FSDP, attempt=2, ckpt=ckpt)
    assert not list((broken / "checkpoints").glob(".*"))
    assert_same_run(straight, broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "division", "kind"),
    [
        (4, {"sharding": "full"}, "adamw"),
        (4, {"dp_replicate": 2, "reshard_after_forward": False}, "adamw"),
        (2, {"tp": 2}, "adamw"),
        (4, {"tp": 2}, "adamw"),
        (4, {"tp": 2, "sharding": "none"}, "sgd"),
        (2, {"sharding": "full", "ac": {"freq": 1}}, "sgd"),
        (4, {"sharding": "full"}, "muon"),
        (4, {"tp": 2}, "muon"),
    ],
)
def test_divisions_equal_one_rank(tmp_path, uneven_model, batches, ranks, division, kind):
    common = {"optim": {"type": kind}}
    train(uneven_model, tmp_path / "one", batches, **common)
    train(uneven_model, tmp_path / "many", batches, ranks=ranks, division=division, **common)
    assert_same_run(tmp_path / "one", tmp_path / "many", tolerance=TOLERANCE[kind])


@pytest.mark.slow
def test_tensor_parallel_llama(tmp_path, build_model, batches):
    """Biases, an untied output projection, and no norms of queries and keys."""
    model = build_model(LlamaConfig, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    train(model, tmp_path / "one", batches)
    train(model, tmp_path / "two", batches, ranks=2, division={"tp": 2})
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_experts_on_shards(tmp_path, build_model, batches, kind):
    """Each rank holds half of the experts of every layer."""
    model = build_model(
        Qwen3MoeConfig, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    )
    optim = {"optim": {"type": kind}}
    train(model, tmp_path / "one", batches, **optim)
    train(model, tmp_path / "two", batches, ranks=2, division={"sharding": "full"}, **optim)
    assert_same_run(tmp_path / "one", tmp_path / "two", tolerance=TOLERANCE[kind])
    key = "experts/max_load"
    loads = [{r["step"]: r[key] for r in records(tmp_path / name) if key in r} for name in ("one", "two")]
    assert loads[0]
    assert loads[1] == loads[0]  # without the empty rows of the rank that has fewer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("adamw", [(2, FSDP), (4, TENSOR), (1, WHOLE), (2, TENSOR)]),
        ("muon", [(2, TENSOR), (2, FSDP), (4, REPLICAS), (1, WHOLE)]),
    ],
)
def test_run_resumes_with_another_number_of_ranks(tmp_path, uneven_model, batches, kind, stages, monkeypatch):
    """Each stage resumes from the previous stage's checkpoint with exactly the same weights."""
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    common = {"optim": {"type": kind}, "scheduler": {"type": "linear", "warmup": 2, "decay": 0}}
    train(uneven_model, straight, batches, **common)
    for step, (ranks, division) in enumerate(stages):
        monkeypatch.setenv("BUCKEYE_ATTEMPT", str(step + 1))
        train(
            uneven_model,
            moved,
            batches[step : step + 1],
            ranks=ranks,
            division=division,
            attempt=step + 1,
            **common,
            max_steps=step + 1,
            ckpt={"resume_step": -1} if step else None,
        )
        state = trainer_state_directory(resolve_checkpoint(moved / "checkpoints", step + 1))
        assert has_shards(state) == (division != WHOLE)
        if step:
            began, ended = weights(moved, step), stored(moved, "model", step)
            assert began.keys() == ended.keys()
            assert all(torch.equal(began[name], tensor) for name, tensor in ended.items())
    assert_same_run(straight, moved, tolerance=TOLERANCE[kind])


def test_shards_are_loaded_from_files_with_every_parameter(uneven_model, tmp_path):
    shutil.copytree(uneven_model, tmp_path / "model")
    assert can_load_tensors(str(tmp_path / "model"))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}  # as in older files
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    assert not can_load_tensors(str(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    assert not can_load_tensors(str(tmp_path / "model"))


@pytest.mark.parametrize(("settings", "device"), [({}, "meta"), ({"load_using_meta": False}, "cpu")])
def test_sharded_model_is_not_loaded_on_each_rank(uneven_model, tmp_path, settings, device):
    """A rank has only names and shapes until it reads its shards."""
    config = trainer_config(uneven_model, tmp_path, model=settings)
    ranks = SimpleNamespace(mesh=object(), device=torch.device("cpu"))
    assert _load_policy(str(uneven_model), config, ranks).model.device.type == device


@pytest.mark.slow
@pytest.mark.parametrize("division", [{"sharding": "full"}, {"tp": 2}])
@pytest.mark.parametrize("by_shards", [True, False])
def test_loading_by_shards_gives_equal_weights(tmp_path, uneven_model, batches, division, by_shards):
    train(uneven_model, tmp_path / "one", batches)
    division = {**division, "load_using_meta": by_shards}
    train(uneven_model, tmp_path / "two", batches, ranks=2, division=division, max_async_level=STEPS)
    first, source = weights(tmp_path / "two", 0), load_file(uneven_model / "model.safetensors")
    assert first.keys() == source.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in source.items())
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_adapters_on_shards(tmp_path, uneven_model, batches, monkeypatch):
    """One rank resumes the checkpoint of two ranks."""
    lora = {"experimental": {"lora": {"rank": 4}}}
    for name, ranks, division in (("one", 1, lora), ("two", 2, {**lora, "sharding": "full"})):
        run = tmp_path / name
        train(uneven_model, run, batches[:2], ranks=ranks, division=division, max_steps=2)
        monkeypatch.setenv("BUCKEYE_ATTEMPT", "2")
        train(uneven_model, run, batches[2:], division=lora, attempt=2, ckpt={"resume_step": -1})
        monkeypatch.delenv("BUCKEYE_ATTEMPT")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_bfloat16_on_shards(tmp_path, uneven_model, batches):
    """Weights are sent as bfloat16; the optimizer and the checkpoint keep float32."""
    division = {"compute_dtype": "bfloat16", "sharding": "full"}
    train(uneven_model, tmp_path / "one", batches)
    train(uneven_model, tmp_path / "two", batches, ranks=2, division=division)
    exact, rounded = ([r["loss"] for r in records(tmp_path / name)] for name in ("one", "two"))
    assert rounded == pytest.approx(exact, rel=0.05, abs=0.01)
    assert rounded != exact
    assert {tensor.dtype for tensor in weights(tmp_path / "two").values()} == {torch.bfloat16}
    assert {t.dtype for t in stored(tmp_path / "two", "model").values()} == {torch.float32}


@pytest.mark.slow
def test_fine_tuning_on_shards(tmp_path, tiny_model):
    """Conversations do not fit into one row together.

    An epoch's last step and the validation, which only runs forward passes, have fewer conversations than
    ranks.
    """
    chats, validated = tmp_path / "chats.jsonl", tmp_path / "validated.jsonl"
    texts = [("one " * 8, "waŋži"), ("two " * 8, "nuŋpa"), ("three " * 6, "yamni"), ("four " * 7, "topa")]
    roles = ("user", "assistant")
    lines = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, t, strict=True)]} for t in texts]
    chats.write_text("\n".join(map(json.dumps, lines)))
    validated.write_text(json.dumps(lines[0]))
    common = {"seq_len": 128, "batch_size": 3, "max_steps": STEPS}
    data = {"path": str(chats), "val_path": str(validated)}
    run_sft(sft_config(tiny_model, tmp_path / "one", data=data, **common))
    model = {"name": str(tiny_model), "device": "cpu", "sharding": "full"}
    config = {
        "data": data,
        "model": model,
        "optim": {"lr": 0.01},
        "output_dir": str(tmp_path / "two"),
        **common,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    launch(2, "-m", "buckeye", "sft", "@", str(tmp_path / "config.json"))
    assert_same_run(tmp_path / "one", tmp_path / "two", process="sft")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_reference_divided_among_ranks(tmp_path, tiny_model, batches, lora):
    """The last batch has one sample: a rank without samples must still take part."""
    lone = batches[2].samples[0]
    lone = replace(lone, advantages=np.ones_like(lone.advantages))
    chosen = [*batches[:2], replace(batches[2], samples=(lone,))]
    unclipped = {"type": "ppo", "kl_coef": 0.2, "clip_low": 1.0, "clip_high": 1e9}
    settings = {"max_steps": 3, "loss": unclipped}
    adapter = {"experimental": {"lora": lora}}
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny_model, one, chosen, division=adapter, **settings)
    train(tiny_model, two, chosen, ranks=2, division={**adapter, "sharding": "full"}, **settings)
    for key in ("loss", "grad_norm", "reference_kl", "ratio_mean"):
        expected = pytest.approx([r[key] for r in records(one)], rel=1e-4, abs=1e-6)
        assert [r[key] for r in records(two)] == expected, key
    found = [next((run / "weights" / "step_3").glob("*.safetensors")) for run in (one, two)]
    expected, actual = map(load_file, found)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_indivisible_heads_are_refused(tmp_path, build_model, batches, capfd):
    model = build_model(Qwen3Config, num_key_value_heads=1)
    with pytest.raises(AssertionError):
        train(model, tmp_path, batches[:1], ranks=2, division={"tp": 2})
    assert "trainer.model.tp = 2" in capfd.readouterr().err


def test_indivisible_number_of_ranks_is_refused(tmp_path, tiny_model, monkeypatch, refusal):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refusal(UsageError):
        train(tiny_model, tmp_path, [], division={"dp_replicate": 2})
