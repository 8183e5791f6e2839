"""The trainer process: steps, publishing, checkpoints, bit-exact resume, several ranks."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.errors import CheckpointError, FinalRunError, TransportError
from buckeye.trainer.rl import run_trainer
from buckeye.transport.batches import Sample, read_batch
from buckeye.transport.checkpoint import list_checkpoints, read_orchestrator_state, resolve_checkpoint
from buckeye.transport.weights import verify_weights
from tests.trainer.ranks import SCRIPT, start_ranks
from tests.trainer.rl_runs import ME, put, records, warnings
from tests.trainer.trainer_config import trainer_config
from tests.waiting import wait_for


def weights(output_dir: Path, step: int):
    return load_file(output_dir / "weights" / f"step_{step}" / "model.safetensors")


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_the_change_of_the_policy_is_that_of_the_weights(tmp_path, train, batches):
    """Recomputed with transformers from the weights before and after the last step."""
    train(tmp_path, batches)
    logged = records(tmp_path)
    assert ["update/logprob_change" in record for record in logged] == [True, True, False, True]
    advantaged = [sample for sample in batches[3].samples if sample.advantages[sample.loss_mask].any()]
    change, advantages = [], []
    for sample in advantaged[: max(1, len(advantaged) // 8)]:
        ids = torch.from_numpy(sample.token_ids).long()
        mask = torch.from_numpy(sample.loss_mask)[1:]
        found = []
        for step in (3, 4):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / f"step_{step}")
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1] / sample.temperature
            found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask])
        change.append(found[1] - found[0])
        advantages.append(torch.from_numpy(sample.advantages)[1:][mask])
    moved, given = torch.cat(change).double(), torch.cat(advantages).double()
    assert logged[3]["update/logprob_change"] == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-2)
    cosine = float(moved @ given / (moved.norm() * given.norm()))
    assert logged[3]["update/agreement"] == pytest.approx(cosine, abs=1e-2)


def test_run_trains_publishes_and_checkpoints(tmp_path, train, batches, capsys):
    train(tmp_path, batches, ckpt={"interval": 2})
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["step_2", "step_3", "step_4"]
    assert list((tmp_path / "batches").iterdir()) == []
    manifest = verify_weights(tmp_path / "weights" / "step_4")
    assert (manifest.run_id, manifest.attempt, manifest.step, manifest.dtype) == ("local", 1, 4, "float32")
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [2, 4]
    assert read_orchestrator_state(resolve_checkpoint(tmp_path / "checkpoints", 2)) == {"emitted": 1}
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == [0, 1, 2, 3]
    for record in logged:
        expected = {"loss", "entropy", "mismatch_kl", "grad_norm", "lr", "tokens_per_second", "time/wait"}
        assert expected <= record.keys()
        assert "mfu" not in record
    assert logged[0]["tokens"] == sum(len(s.token_ids) for s in batches[0].samples)
    assert 0.004 < logged[0]["mismatch_kl"] < 0.006  # noise of variance 0.01: half of it
    assert [r["staleness_max"] for r in logged] == [0, 1, 1, 1]
    assert logged[3]["staleness_share_1"] == 1.0
    assert [r["samples_left_out"] for r in logged] == [0, 0, 0, 0]
    assert 0.9 < logged[0]["ratio_mean"] < 1.1
    assert 0.98 < logged[0]["effective_sample_size"] < 0.995  # about 1 / (1 + variance)
    assert logged[0]["zero_advantage_share"] == 0.0
    lines = capsys.readouterr().out
    assert "SUCCESS Step 3 | Time: " in lines
    assert "MFU" not in lines
    assert "finished!" in (tmp_path / "logs" / "run.log").read_text()


def test_the_published_model_is_complete(tmp_path, train, tiny_model, batches):
    train(tmp_path, batches[:1])
    directory = tmp_path / "weights" / "step_1"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ŋ"}], tokenize=False)
    assert rendered == "<|im_start|>user\nŋ<|im_end|>\n"
    assert model.config.tie_word_embeddings
    first = weights(tmp_path, 0)
    assert "lm_head.weight" not in first
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(original[name], tensor) for name, tensor in first.items())
    assert not torch.equal(model.get_input_embeddings().weight, original["model.embed_tokens.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_resume_is_bit_exact(tmp_path, train, tiny_model, batches, optimizer):
    common = {"optim": {"type": optimizer}, "scheduler": {"type": "cosine", "warmup": 1}}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, batches, **common)
    put(broken, batches[:2])
    common["max_steps"] = 4
    with pytest.raises(TransportError, match="no batch 2 arrived"):
        run_trainer(trainer_config(tiny_model, broken, ckpt={"interval": 2}, batch_timeout=0.1, **common))
    train(broken, batches[2:], attempt=2, ckpt={"resume_step": -1}, **common)
    assert_equal(weights(broken, 4), weights(straight, 4))
    for key in ("loss", "grad_norm", "entropy", "mismatch_kl", "lr"):
        assert [r[key] for r in records(broken)] == [r[key] for r in records(straight)]
    optimizers = [
        load_file(resolve_checkpoint(run / "checkpoints", 4).path / "trainer" / "optimizer.safetensors")
        for run in (straight, broken)
    ]
    assert_equal(*optimizers)


def test_resume_without_a_checkpoint_is_refused(tmp_path, tiny_model, refusal):
    with refusal(CheckpointError):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=4, ckpt={"resume_step": -1}))


@pytest.mark.parametrize(
    ("warmup", "decay", "said"),
    [(1, 5, "falls right after the warm-up"), (4, 0, "never reaches its peak"), (1, 1, None)],
)
def test_schedule_longer_than_the_run_is_warned_about(tmp_path, train, batches, warmup, decay, said):
    schedule = {"type": "linear", "warmup": warmup, "decay": decay}
    train(tmp_path, batches[:2], scheduler=schedule)
    log = (tmp_path / "logs" / "run.log").read_text()
    assert (f"exceed the 2 steps of the run: the lr {said}" in log) is (said is not None)
    assert ("exceed the 2 steps" in log) is (said is not None)


def test_muon_uses_the_configured_momentum(tmp_path, train, batches):
    moved = {}
    for momentum in (0.95, 0.0):
        optim = {"type": "muon", "momentum": momentum}
        train(tmp_path / str(momentum), batches[:2], optim=optim)
        moved[momentum] = weights(tmp_path / str(momentum), 2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(moved[0.95][name], moved[0.0][name])


def test_the_checkpoint_resumed_from_may_be_pruned(tmp_path, train, batches):
    train(tmp_path, batches[:1])
    ckpt = {"interval": 1, "keep": 1, "resume_step": -1}
    train(tmp_path, batches[1:], attempt=2, max_steps=4, ckpt=ckpt)
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [4]
    assert (tmp_path / "weights" / "step_4" / "tokenizer.json").exists()


@pytest.mark.e2e
def test_sigterm_checkpoints_and_returns(tmp_path, tiny_model, batches):
    put(tmp_path, batches[:1])
    config = trainer_config(tiny_model, tmp_path, max_steps=4)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (process,) = start_ranks(1, str(SCRIPT), str(tmp_path / "config.json"))
    try:
        wait_for(lambda: (tmp_path / "weights" / "step_1").exists() or process.poll() is not None)
        process.terminate()
        assert process.wait() == 0
    finally:
        process.kill()
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [1]
    assert read_orchestrator_state(resolve_checkpoint(tmp_path / "checkpoints", -1)) == {"emitted": 0}
    assert "finished" not in (tmp_path / "logs" / "run.log").read_text()


def _with(sample: Sample, **changes) -> Sample:
    """Return the sample with some arrays filled with constant values."""
    arrays = {name: np.full_like(getattr(sample, name), value) for name, value in changes.items()}
    return replace(sample, **arrays)


def test_step_with_a_non_finite_gradient_is_skipped_and_counted(tmp_path, train, batches, wording):
    poisoned = _with(batches[0].samples[0], advantages=3e38)  # finite, unlike its product with a ratio
    train(
        tmp_path, [replace(batches[0], samples=(poisoned, *batches[0].samples[1:])), batches[1]], max_steps=2
    )
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "SUCCESS Step 0 | Time: " in log
    assert "WARNING Step 0 skipped" in log
    assert "SUCCESS Step 1 | Time: " in log
    assert [r["skipped"] for r in records(tmp_path)] == [1, 0]
    assert_equal(weights(tmp_path, 0), weights(tmp_path, 1))
    assert all(t.isfinite().all() for t in weights(tmp_path, 2).values())
    progress = resolve_checkpoint(tmp_path / "checkpoints", 2).path / "trainer" / "progress.json"
    assert json.loads(progress.read_text())["skipped"] == 1
    kept = read_batch(tmp_path / "skipped", 0, identity=ME)
    assert len(kept.samples) == len(batches[0].samples)
    assert warnings(tmp_path) == wording
    assert [path.name for path in (tmp_path / "skipped").iterdir()] == ["step_0"]


CANNOT_BE_LEARNED_FROM = {
    "not_finite": [{"advantages": np.nan}, {"logprobs": -np.inf}],
    "vocabulary": [{"token_ids": 264}, {"token_ids": -1}],
    "version": [{"versions": 2}, {"versions": -1}],
    "temperature": [{"temperature": 0.0}, {"temperature": np.nan}],
    "first_token": [{"loss_mask": True}],
}


@pytest.mark.parametrize("cause", CANNOT_BE_LEARNED_FROM)
def test_invalid_samples_do_not_change_the_step(tmp_path, train, batches, cause, wording):
    train(tmp_path / "without", batches[:2])
    good = batches[1].samples[0]
    bad = [
        replace(good, **change) if "temperature" in change else _with(good, **change)
        for change in CANNOT_BE_LEARNED_FROM[cause]
    ]
    run = tmp_path / "with"
    train(run, [batches[0], replace(batches[1], samples=(*batches[1].samples, *bad))])
    assert_equal(weights(run, 2), weights(tmp_path / "without", 2))
    record = records(run)[1]
    assert (record["samples_left_out"], record[f"samples_left_out/{cause}"]) == (len(bad), len(bad))
    assert record["skipped"] == 0
    assert warnings(run) == wording
    assert len(read_batch(run / "skipped", 1, identity=ME).samples) == len(bad)


def test_samples_that_cannot_be_written_do_not_end_the_training(tmp_path, train, batches):
    (tmp_path / "skipped").write_text("not a folder")
    bad = replace(batches[0].samples[0], temperature=0.0)
    train(tmp_path, [replace(batches[0], samples=(*batches[0].samples, bad))], max_steps=1)
    assert records(tmp_path)[0]["samples_left_out"] == 1
    assert "Not keeping the untrained samples of step 0" in (tmp_path / "logs" / "run.log").read_text()


def test_too_old_sample_is_left_out(tmp_path, train, batches):
    old = _with(batches[2].samples[0], versions=0)
    train(
        tmp_path,
        [*batches[:2], replace(batches[2], samples=(old, *batches[2].samples[1:]))],
        max_steps=3,
        max_off_policy_steps=1,
    )
    assert [r["samples_left_out"] for r in records(tmp_path)] == [0, 0, 1]
    assert "sample 0 (version: " in (tmp_path / "logs" / "run.log").read_text()


def test_a_rollout_across_five_updates_has_the_ratio_of_each_token_to_the_version_that_wrote_it(
    tmp_path, train, tiny_model, batches
):
    """The learning rate is 0, so each version's log-probs are known, and ratios are hand-computed."""
    sample = max(batches[0].samples, key=lambda sample: len(sample.token_ids))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(sample.token_ids, dtype=torch.long)[None]).logits[0]
    exact = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(sample.token_ids[1:, None], dtype=torch.long))
    written = np.flatnonzero(sample.loss_mask)
    ages = np.linspace(5, 0, len(written)).round().astype(int)  # versions 0 to 5 sampled these tokens
    ratios = np.array([1.0, 0.8, 1.25, 0.5, 2.0, 1.5])[ages]
    versions, logprobs = sample.versions.copy(), sample.logprobs.copy()
    versions[written] = 5 - ages
    logprobs[written] = exact.numpy()[written - 1, 0] - np.log(ratios)
    spanning = replace(sample, versions=versions, logprobs=logprobs)
    put(tmp_path, [replace(batches[0], step=step) for step in range(5)])
    train(
        tmp_path,
        [replace(batches[0], step=5, samples=(spanning,))],
        max_steps=6,
        optim={"type": "adamw", "lr": 0.0},
    )
    record = records(tmp_path)[5]
    assert record["samples_left_out"] == 0
    assert record["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert record["mismatch_kl"] == pytest.approx((ratios - np.log(ratios) - 1).mean(), rel=1e-3)
    assert (record["staleness_max"], record["staleness_mean"]) == pytest.approx((5, ages.mean()))
    for age in range(6):
        assert record[f"staleness_share_{age}"] == pytest.approx((ages == age).mean())
    loss = -(sample.advantages[written] * ratios).mean()  # masked_ratio keeps all: they are in 0.125 to 8
    assert record["loss"] == pytest.approx(loss, rel=1e-4)


def test_ten_batches_without_usable_samples_end_the_run(tmp_path, tiny_model, batches, refusal):
    nothing = (_with(batches[0].samples[0], token_ids=264),)
    put(tmp_path, [replace(batches[0], step=step, samples=nothing) for step in range(10)])
    with refusal(FinalRunError):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=20))
    assert records(tmp_path)[-1]["skipped_steps"] == 9


def test_number_of_kept_untrained_samples_is_limited(tmp_path, train, batches):
    poisoned = (_with(batches[0].samples[0], advantages=3e38, versions=0),)
    train(
        tmp_path,
        [replace(batches[0], step=step, samples=poisoned) for step in range(11)],
        max_steps=11,
        max_async_level=11,
    )
    assert len(list((tmp_path / "skipped").iterdir())) == 10
    assert "step 10" in warnings(tmp_path)[-2]
    assert records(tmp_path)[-1]["skipped_steps"] == 11
    assert "WARNING RL trainer finished!" in (tmp_path / "logs" / "run.log").read_text()


def test_batch_without_advantage_has_loss_zero(tmp_path, train, batches):
    silent = tuple(replace(s, advantages=np.zeros_like(s.advantages)) for s in batches[0].samples)
    train(tmp_path, [replace(batches[0], samples=silent), replace(batches[1], samples=())])
    assert [(r["loss"], r["grad_norm"]) for r in records(tmp_path)] == [(0, 0), (0, 0)]
    assert (tmp_path / "weights" / "step_2").exists()


def _silent(batch):
    return replace(batch, samples=tuple(_with(sample, advantages=0.0) for sample in batch.samples))


def _masked(batch):
    return replace(batch, samples=tuple(_with(sample, loss_mask=False) for sample in batch.samples))


def _far(batch):
    """Return a batch whose ratios are all outside the loss's bounds."""
    return replace(batch, samples=tuple(_with(sample, logprobs=-50.0) for sample in batch.samples))


@pytest.mark.parametrize(
    ("optimizer", "teaches_nothing"),
    [("adamw", _silent), ("adamw", _masked), ("adamw", _far), ("muon", _silent), ("sgd", _silent)],
)
def test_step_without_a_gradient_does_not_move_the_weights(
    tmp_path, train, batches, optimizer, teaches_nothing
):
    """With momentum and weight decay; the schedule and the run's weight version still advance."""
    optim = {"type": optimizer, "weight_decay": 0.1}
    schedule = {"type": "linear", "warmup": 0, "decay": 4}
    nothing = [teaches_nothing(batches[1]), teaches_nothing(batches[2])]
    train(tmp_path, [batches[0], *nothing, batches[3]], max_async_level=3, optim=optim, scheduler=schedule)
    found = records(tmp_path)
    assert [r["empty_steps"] for r in found] == [0, 1, 2, 2]
    assert [r["skipped"] for r in found] == [0, 0, 0, 0]
    assert len({r["lr"] for r in found}) == 4
    assert_equal(weights(tmp_path, 1), weights(tmp_path, 2))
    assert_equal(weights(tmp_path, 1), weights(tmp_path, 3))
    assert not torch.equal(*(weights(tmp_path, s)["model.embed_tokens.weight"] for s in (3, 4)))
    assert len(warnings(tmp_path)) == 1  # at the first one, and at each power of ten
    assert not (tmp_path / "skipped").exists()


def test_resume_after_steps_without_a_gradient_is_bit_exact(tmp_path, train, batches):
    given = [batches[0], _silent(batches[1]), _silent(batches[2]), batches[3]]
    common = {"scheduler": {"type": "cosine", "warmup": 1}, "max_steps": 4}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, given, **common)
    train(broken, given[:2], max_steps=2, scheduler={"type": "cosine", "warmup": 1})
    (broken / "metrics.jsonl").unlink()
    train(broken, given[2:], attempt=2, ckpt={"resume_step": -1}, **common)
    assert [r["empty_steps"] for r in records(broken)] == [2, 2]
    optimizers = [
        load_file(resolve_checkpoint(run / "checkpoints", 4).path / "trainer" / "optimizer.safetensors")
        for run in (straight, broken)
    ]
    assert {int(t) for n, t in optimizers[0].items() if n.endswith("step")} == {2}
    assert_equal(*optimizers)
    assert_equal(weights(broken, 4), weights(straight, 4))
    assert [r["lr"] for r in records(broken)] == [r["lr"] for r in records(straight)[2:]]


def test_samples_without_advantage_change_nothing_but_the_divisor(tmp_path, train, batches):
    samples = list(batches[0].samples)
    samples[0] = replace(samples[0], advantages=np.zeros_like(samples[0].advantages))
    losses = []
    for name, bonus in (("skipped", 0.0), ("forwarded", 1e-30)):  # with an entropy bonus every sample counts
        loss = {"entropy_coef": bonus}
        train(tmp_path / name, [replace(batches[0], samples=tuple(samples))], max_steps=1, loss=loss)
        losses.append([records(tmp_path / name)[0][key] for key in ("loss", "grad_norm")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    shares = [records(tmp_path / name)[0]["zero_advantage_share"] for name in ("skipped", "forwarded")]
    assert shares == pytest.approx([1 / 9] * 2)


def test_the_loss_is_per_token_of_the_whole_batch(tmp_path, train, tiny_model, batches):
    """The reported loss equals one computed naively, for any bins."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    total, tokens = 0.0, 0
    for sample in batches[0].samples:
        ids = torch.from_numpy(sample.token_ids).long()
        with torch.no_grad():
            log_p = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratio = (log_p - torch.from_numpy(sample.logprobs[1:])).exp().numpy()
        mask = sample.loss_mask[1:] & (ratio > 0.125) & (ratio < 8)
        total -= float((ratio * sample.advantages[1:])[mask].sum())
        tokens += int(sample.loss_mask.sum())
    found = []
    for seq_len in (40, 1000):
        run = tmp_path / str(seq_len)
        train(run, batches[:1], seq_len=seq_len)
        found.append(records(run)[0])
    assert [r["loss"] for r in found] == pytest.approx([total / tokens] * 2, rel=1e-4)
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
    assert found[0]["trained_tokens"] == tokens


@pytest.mark.slow
def test_all_ranks_stop_together(tmp_path, tiny_model, batches):
    put(tmp_path, batches[:1])
    config = trainer_config(tiny_model, tmp_path, max_steps=4)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    processes = start_ranks(2, str(SCRIPT), str(tmp_path / "config.json"))
    log = tmp_path / "logs" / "run.log"
    wait_for(lambda: log.exists() and log.read_text().count("Step 0 |") == 2)
    processes[1].send_signal(signal.SIGTERM)  # one rank gets the signal, all ranks stop
    assert [process.wait() for process in processes] == [0, 0]
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [1]
    assert "at step 1" in log.read_text()
