"""Tests that separate causes: they load a model, run an environment, or recompute a step."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from buckeye.analysis.diagnosis.chain import LinkReport
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.grade_again import grade_again
from buckeye.analysis.diagnosis.statistics import mean_interval, rms
from buckeye.analysis.replay.retrain import masked_logprobs, measure_policy_changes
from buckeye.base.storage import step_directory
from buckeye.config.load import load_config
from buckeye.errors import BuckeyeError
from buckeye.monitor.finding import Finding
from buckeye.trainer.model.policy import PolicyNetwork, load_policy
from buckeye.transport.batches import Batch

_MAX_SAMPLES = 16
_FIRST_STEPS = 3
_MIN_TOKENS = 40
_CHECK_SECONDS = 20.0
_BELOW_CHANCE_NATS = 0.3  # nats


def run_active_tests(facts: DiagnosisFacts, links: Mapping[str, LinkReport]) -> list[str]:
    """Add the findings of the tests to their links. Return the reason for each test that could not run.

    Links after the first broken one are not tested: their faults may follow from it.
    """
    notes = list[str]()
    for name, report in links.items():
        for test in TESTS.get(name, ()):
            try:
                for finding in test(facts):
                    report.add(finding)
            except (BuckeyeError, OSError, ValueError, LookupError, RuntimeError) as error:
                notes.append(f"{test.__name__.replace('_', ' ')}: {error}")
        if report.state == "broken":
            break
    return notes


def _load(model: Path) -> PolicyNetwork:
    return load_policy(str(model), torch.device("cpu"))


def other_tokenizer(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Test for the tokenizer of another model.

    A model that knows its chat template assigns the prompts more than chance likelihood. With the tokens of
    another tokenizer, the likelihood falls below chance. It can also be below chance if the model was
    fine-tuned without a loss on prompts. Such a model still learns, so the test reports nothing if the reward
    rises.
    """
    named = facts.run.setting("trainer.model.name")
    model = Path(str(named)) if named and Path(str(named)).is_dir() else facts.run.tokenizer_directory
    if model is None or not facts.batches:
        raise LookupError("no model was found, or no batch was kept")
    policy = _load(model)
    vocabulary = policy.vocab_size
    samples = [sample for sample in facts.batches[0].batch.samples if sample.loss_mask.argmax() > 2]
    prompts = [~np.logical_or.accumulate(sample.loss_mask) for sample in samples[:_MAX_SAMPLES]]
    for prompt in prompts:
        prompt[0] = False  # no log-prob
    values = np.concatenate([np.empty(0), *masked_logprobs(policy, samples[:_MAX_SAMPLES], prompts)])
    if len(values) < _MIN_TOKENS:
        raise LookupError("too few tokens of prompts were kept")
    spread = [step.value("orchestrator/batch/with_spread") or 0.0 for step in facts.batch_steps]
    rewards_differ = float(np.mean(spread[:_FIRST_STEPS] or [0.0])) > 1 / 3
    if mean_interval(values)[1] < -math.log(vocabulary) - _BELOW_CHANCE_NATS and not facts.has_risen:
        yield facts.finding(
            "wrong_tokenizer",
            f"the model gives the prompts a lower log-prob ({values.mean():.1f} nats a token) than chance "
            f"({-math.log(vocabulary):.1f})",
            facts.batches[0].batch.step,
            confidence="possible" if rewards_differ else "likely",
        )


def _batches_with_weights(facts: DiagnosisFacts, *ages: int) -> Iterator[tuple[Batch, list[Path]]]:
    """Yield the kept batches, newest first, with the kept weights that are `ages` steps newer."""
    for kept in reversed(facts.batches):
        paths = [step_directory(facts.run.path / "weights", kept.batch.step + age) for age in ages]
        if all((path / "model.safetensors").is_file() for path in paths):
            yield kept.batch, paths


def sampler_against_weights(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Recompute the log-probs of tokens sampled with the newest weights.

    A difference comes from the engine, not from staleness.
    """
    for batch, (path,) in _batches_with_weights(facts, 0):
        fresh = [sample.loss_mask & (sample.versions == batch.step) for sample in batch.samples]
        chosen = [at for at, mask in enumerate(fresh[:_MAX_SAMPLES]) if mask.any()]
        samples, masks = [batch.samples[at] for at in chosen], [fresh[at] for at in chosen]
        recorded = [sample.logprobs[mask] for sample, mask in zip(samples, masks, strict=True)]
        values = np.concatenate([np.empty(0), *masked_logprobs(_load(path), samples, masks)])
        if len(values) < _MIN_TOKENS:
            continue
        apart = rms(values - np.concatenate(recorded))
        if apart > 3 * facts.rounding_tolerance:
            seen = f"log-probs of version {batch.step} differ from those of its weights by {apart:.3f} nats"
            yield facts.finding("engine_differs", seen, batch.step)
        return
    raise LookupError("no step has kept both its batch and its weights")


def updated_towards_rewards(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Test that a step does not make samples with positive advantages less likely than others.

    The log-probs are recomputed with the weights before and after the step.
    """
    batch, paths = next(_batches_with_weights(facts, 0, 1), (None, []))
    if batch is None:
        raise LookupError("no step has kept its batch and the weights before and after it")
    samples = [sample for sample in batch.samples if sample.advantages[sample.loss_mask].any()]
    old, new = (masked_logprobs(_load(path), samples) for path in paths)
    gained = [
        float(((now - then) * sample.advantages[sample.loss_mask]).sum())
        for sample, then, now in zip(samples, old, new, strict=True)
    ]
    if len(gained) >= 8 and mean_interval(gained, 3.0)[1] < 0:
        seen = (
            f"step {batch.step} made samples with a positive advantage less likely: the mean of advantage x "
            f"change of log-prob is {np.mean(gained):.2g}"
        )
        yield facts.finding("update_against_advantages", seen, batch.step)


def check_environments(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Run the checks of `buckeye env check`: repeated grading, content-free policies, answers in prompts."""
    from buckeye.evaluation.env_check import CheckOptions, check_environment

    names = {
        "grades are repeatable": "grader_random",
        "no answer in the prompt": "answer_in_prompt",
        "train and held-out are disjoint": "evaluated_on_train",
        "accepted answers are rewarded": "answers_unpaid",
    }
    for env in facts.run.setting("orchestrator.env") or []:
        variables = tuple(env.get("variables") or ())
        options = CheckOptions(limit=0.03, budget=_CHECK_SECONDS, sample=50, variables=variables)
        report = asyncio.run(check_environment(str(env["id"]), env.get("args") or {}, options))
        for check in report.checks:
            if check.status in ("error", "warning"):
                yield facts.finding(
                    names.get(check.name, check.name.replace(" ", "_")),
                    f"environment {env['id']}: {check.name}: {check.detail}",
                    confidence="sure" if check.status == "error" else "possible",
                )


def replay_newest_step(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Recompute the newest kept step, and report a difference."""
    from buckeye.analysis.replay.replay_step import replay_step
    from buckeye.config.trainer import TrainerConfig

    step = _kept_steps(facts)[-1]
    config = load_config(TrainerConfig, ["@", str(facts.run.path / "configs" / "trainer.json")])
    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        replay = replay_step(
            facts.run.path, config, step, until="gradient", device=None, scratch=Path(scratch)
        )
    first = replay.first_difference
    if first is not None and not replay.within_tolerance:
        yield facts.finding(
            "not_repeatable",
            f"step {first.step} computed again differs in {first.stage}: recorded {first.recorded}, now "
            f"{first.replayed}",
            step,
        )


def _kept_steps(facts: DiagnosisFacts) -> list[int]:
    """Return the steps to train again. Raise `LookupError` without any, or without the trainer's settings."""
    steps = [kept.batch.step for kept in facts.batches]
    if not steps or not (facts.run.path / "configs" / "trainer.json").is_file():
        raise LookupError("no batch was kept, or the trainer's settings are not recorded")
    return steps


def train_at_zero_rate(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Train a step at learning rate 0, and report any change of log-probs.

    The gradient cannot cause such a change.
    """
    step = _kept_steps(facts)[0]
    (change,) = measure_policy_changes(facts.run.path, 0.0, 1)
    if change > 0.0 or math.isnan(change):
        seen = f"step {step} trained again at learning rate 0 changes the policy by {change:.2g} nats a token"
        yield facts.finding("moves_without_rate", seen, step, confidence="sure")


TESTS: Mapping[str, Sequence[Callable[[DiagnosisFacts], Iterator[Finding]]]] = {
    "model": (other_tokenizer,),
    "reward": (grade_again, check_environments),
    "advantage and loss": (updated_towards_rewards, replay_newest_step),
    "update": (train_at_zero_rate,),
    "sync": (sampler_against_weights,),
}
"""Tests of `--try`, by link."""
