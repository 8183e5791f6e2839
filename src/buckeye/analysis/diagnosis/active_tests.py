"""Tests that separate causes: they load a model, run an environment, or recompute a step."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from buckeye.analysis.diagnosis.chain import LinkReport
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.half_group_training import (
    Agreement,
    KeptBatch,
    Values,
    agreement,
    common_token,
    component_weights,
    find_consecutive_batches,
    train_on_half,
)
from buckeye.analysis.diagnosis.statistics import SURE, mean_interval, rms
from buckeye.analysis.diagnosis.templates import decode_tokens, load_tokenizer_file
from buckeye.analysis.replay.retrain import masked_logprobs, measure_policy_changes
from buckeye.base.storage import step_directory
from buckeye.config.load import load_config
from buckeye.errors import BuckeyeError
from buckeye.monitor.finding import Finding
from buckeye.trainer.model.policy import PolicyNetwork, load_policy
from buckeye.transport.batches import Sample

_MAX_SAMPLES = 16
_FIRST_STEPS = 3
_MIN_TOKENS = 40
_MIN_GROUPS = 12
_SMALL_SHARE = 0.02
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
                for result in test(facts):
                    if isinstance(result, Finding):
                        report.add(result)
                    else:
                        notes.append(result)
            except (BuckeyeError, OSError, ValueError, LookupError, RuntimeError) as error:
                notes.append(f"{test.__name__.replace('_', ' ')}: {error}")
        if report.state == "broken":
            break
    return notes


def _load(model: Path) -> PolicyNetwork:
    return load_policy(str(model), torch.device("cpu"))


def other_tokenizer(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Test for the tokenizer of another model.

    A model that knows its chat template assigns the prompts more than chance likelihood. With the tokens of
    another tokenizer, the likelihood falls below chance. A model that was trained on replies only has the
    same likelihood, but learns.
    """
    named = facts.run.setting("trainer.model.name")
    model = Path(str(named)) if named and Path(str(named)).is_dir() else facts.model
    if model is None or not facts.batches:
        yield "the tokenizer: no model was found, or no batch was kept"
        return
    tokenizer, policy = load_tokenizer_file(model), _load(model)
    vocabulary = int(policy.model.config.vocab_size)
    samples, contexts = list[Sample](), list[npt.NDArray[np.bool_]]()
    for sample in facts.batches[0].batch.samples[:_MAX_SAMPLES]:
        places = np.flatnonzero(sample.loss_mask)
        if not len(places) or places[0] < 3:
            continue
        context = np.zeros(len(sample.token_ids), bool)
        context[1 : places[0]] = True
        samples.append(sample)
        contexts.append(context)
    values = np.concatenate([np.empty(0), *masked_logprobs(policy, samples, contexts)])
    spread = [
        step.value("orchestrator/batch/with_spread") or 0.0 for step in facts.batch_steps[:_FIRST_STEPS]
    ]
    rewards_differ = float(np.mean(spread or [0.0])) > 1 / 3
    size = tokenizer.get_vocab_size() if tokenizer is not None else 0
    if len(values) < _MIN_TOKENS:
        yield "the tokenizer: too few tokens of prompts were kept"
        return
    _, high = mean_interval(values)
    if high < -math.log(vocabulary) - _BELOW_CHANCE_NATS and not facts.has_risen:
        yield facts.finding(
            "wrong_tokenizer",
            f"The model gives the prompts a lower log-prob ({values.mean():.1f} nats a token) than chance "
            f"({-math.log(vocabulary):.1f})",
            f"the tokenizer ({size} tokens) belongs to another model (vocabulary of {vocabulary})",
            "copy tokenizer.json and tokenizer_config.json of this model into its directory",
            evidence=[
                (
                    "the first prompt, decoded: "
                    f"{decode_tokens(model, facts.batches[0].batch.samples[0].token_ids)!r}",
                    facts.rollouts(facts.batches[0].batch.step),
                )
            ],
            confidence="possible" if rewards_differ else "likely",
            logprob=float(values.mean()),
        )


def sampler_against_weights(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Recompute the log-probs of tokens sampled with the newest weights.

    A difference comes from the engine, not from staleness.
    """
    for batch in reversed(facts.batches):
        path = step_directory(facts.run.path / "weights", batch.batch.step)
        if not (path / "model.safetensors").is_file():
            continue
        policy = _load(path)
        newest = batch.batch.step
        samples = [
            sample for sample in batch.batch.samples[:_MAX_SAMPLES] if (sample.versions == newest).any()
        ]
        fresh = [sample.loss_mask & (sample.versions == newest) for sample in samples]
        recorded = [sample.logprobs[mask] for sample, mask in zip(samples, fresh, strict=True)]
        values = np.concatenate([np.empty(0), *masked_logprobs(policy, samples, fresh)])
        values -= np.concatenate([np.empty(0), *recorded])
        if len(values) < _MIN_TOKENS:
            continue
        if rms(values) > 3 * facts.rounding_tolerance:
            step = batch.batch.step
            yield facts.finding(
                "engine_differs",
                f"Log-probs recorded for version {step} differ from those of its weights by "
                f"{rms(values):.3f} nats",
                "staleness does not explain it: the engine has other weights, or computes differently",
                "restart the engines; compare their dtype with the trainer's",
                evidence=[("weights and batch of that step", facts.command("replay", "--step", step))],
                difference=rms(values),
            )
        return
    yield "sampler against its weights: no step has kept both its batch and its weights"


def updated_towards_rewards(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Test that a step does not make samples with positive advantages less likely than others.

    The log-probs are recomputed with the weights before and after the step.
    """
    for batch in reversed(facts.batches):
        before, after = (
            step_directory(facts.run.path / "weights", batch.batch.step + more) for more in (0, 1)
        )
        if not all((path / "model.safetensors").is_file() for path in (before, after)):
            continue
        samples = [sample for sample in batch.batch.samples if sample.advantages[sample.loss_mask].any()]
        old, new = (masked_logprobs(_load(path), samples) for path in (before, after))
        gained = [
            float(((now - then) * sample.advantages[sample.loss_mask]).sum())
            for sample, then, now in zip(samples, old, new, strict=True)
        ]
        _, high = mean_interval(np.array(gained), 3.0)
        if len(gained) >= 8 and high < 0:
            step = batch.batch.step
            yield facts.finding(
                "update_against_advantages",
                f"Step {step} made samples with positive advantages less likely: {np.mean(gained):.2g} nats "
                "x advantage per sample",
                "the loss has the wrong sign, or another term of it outweighs the rewards",
                "check trainer.loss, and your own loss",
                evidence=[("the step again", facts.command("replay", "--step", step))],
                gained=float(np.mean(gained)),
            )
        return
    yield "the update against its advantages: no step has kept its batch and the weights before and after it"


def check_environments(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Run the checks of `buckeye env check`: repeated grading, content-free policies, answers in prompts."""
    from buckeye.evaluation.env_check import CheckOptions, check_environment

    names = {
        "grades are repeatable": ("grader_random", "the grade depends on more than the answer"),
        "no answer in the prompt": ("answer_in_prompt", "prompts contain the answer"),
        "train and held-out are disjoint": ("evaluated_on_train", "evaluation tasks are also trained on"),
        "accepted answers are rewarded": ("answers_unpaid", "correct answers get no reward"),
    }
    for env in facts.run.setting("orchestrator.env") or []:
        variables = tuple(env.get("variables") or ())
        options = CheckOptions(limit=0.03, budget=_CHECK_SECONDS, sample=50, variables=variables)
        report = asyncio.run(check_environment(str(env["id"]), env.get("args") or {}, options))
        for check in report.checks:
            name, cause = names.get(check.name, (check.name.replace(" ", "_"), check.name))
            if check.status not in ("error", "warning"):
                continue
            yield facts.finding(
                name,
                f"`buckeye env check {env['id']}`: {check.name}: {check.detail}",
                cause,
                "fix the environment",
                evidence=[("the check again", f"buckeye env check {env['id']}")],
                confidence="sure" if check.status == "error" else "possible",
            )


def replay_newest_step(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Recompute the newest kept step, and report a difference."""
    from buckeye.analysis.replay.replay_step import replay_step
    from buckeye.config.trainer import TrainerConfig

    file = facts.run.path / "configs" / "trainer.json"
    if not file.is_file() or not facts.batches:
        yield "a step again: no batch was kept, or the trainer's settings are not recorded"
        return
    config, step = load_config(TrainerConfig, ["@", str(file)]), facts.batches[-1].batch.step
    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        replay = replay_step(
            facts.run.path, config, step, until="gradient", device=None, scratch=Path(scratch)
        )
    if not replay.within_tolerance:
        first = replay.first_difference
        assert first is not None
        yield facts.finding(
            "not_repeatable",
            f"Step {first.step} computed again differs in {first.stage}: recorded {first.recorded}, now "
            f"{first.replayed}",
            "the code, the settings or the machine differ from those of the run",
            "compare them with those of the run",
            evidence=[("the step again", facts.command("replay", "--step", step))],
        )


def train_at_zero_rate(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Train a step at learning rate 0, and report any change of log-probs.

    The gradient cannot cause such a change.
    """
    if not (facts.run.path / "configs" / "trainer.json").is_file() or not facts.batches:
        yield "a step at learning rate 0: no batch was kept, or the trainer's settings are not recorded"
        return
    (change,) = measure_policy_changes(facts.run.path, 0.0, 1)
    if change > 0.0 or math.isnan(change):
        step = facts.run.kept_steps[0]
        yield facts.finding(
            "moves_without_rate",
            f"Step {step} trained again at learning rate 0 changes the policy by {change:.2g} nats a token",
            "something other than the gradient changes the weights: weight decay that ignores the learning "
            "rate, or a state of the model that the forward pass changes",
            "check what the optimizer and the model change besides the update",
            evidence=[("the step again", facts.command("replay", "--step", step))],
            confidence="sure",
            change=change,
        )


def rewards_learnable(facts: DiagnosisFacts) -> Iterator[Finding | str]:
    """Test if rewards can be learned, with half of each group's rollouts as training data.

    On the other half, the change of likelihood must correlate with the rewards, beyond three standard errors.
    If it does not, training is repeated with a control: the reward is 1 for replies that contain a common
    token. If training lowers a reward component, training is repeated without the largest component.
    """
    batches = find_consecutive_batches(facts)
    if not batches or not (facts.run.path / "configs" / "trainer.json").is_file():
        yield "learnable rewards: no usable batch was kept of the first step, or of a step with a checkpoint"
        return
    moved = train_on_half(facts, batches, lambda batch: batch.advantages)
    if not all(np.isfinite(values).all() for values in moved):
        yield "learnable rewards: the model breaks at the run's highest learning rate"
        return
    own = agreement(batches, moved, lambda batch: batch.rewards)
    if own.groups < _MIN_GROUPS:
        yield (
            f"learnable rewards: too few groups. In {own.groups} groups rewards differ in the half that is "
            f"not trained on; {_MIN_GROUPS} are needed, of at least 4 rollouts"
        )
        return
    yield from _compare_with_control(facts, batches, own)
    yield from _remove_largest_component(facts, batches, moved)


def _compare_with_control(
    facts: DiagnosisFacts, batches: Sequence[KeptBatch], own: Agreement
) -> Iterator[Finding | str]:
    if own.mean > 3 * own.error:
        return
    token = common_token(batches)
    if token is None:
        yield "learnable rewards: no control is possible, as no token is in about half of the replies"
        return
    moved = train_on_half(facts, batches, lambda batch: batch.sampled_mask(token))
    control = agreement(batches, moved, lambda batch: batch.sampled_mask(token))
    if control.mean < SURE * control.error:
        yield f"learnable rewards: not even a reward for one word is learned ({control})"
        return
    if abs(own.mean) + own.error > control.mean / 2:
        return
    first, last = batches[0].batch.step, batches[-1].batch.step
    yield facts.finding(
        "rewards_teach_nothing",
        f"After training on half of each group (steps {first} to {last}), the better rollouts of the other "
        f"half are not more likely: correlation {own}. With a reward for one word, they become more "
        f"likely: {control}",
        "the rewards do not depend on the replies, or the tasks differ too much for this number of rollouts",
        "grade twice (`buckeye env check`); raise orchestrator.batch_size and rollouts_per_example",
        evidence=[("replies and rewards", facts.rollouts(last))],
        confidence="possible",
        since=first,
        until=last,
        own=own.mean,
        control=control.mean,
        error=own.error,
    )


def _remove_largest_component(
    facts: DiagnosisFacts, batches: Sequence[KeptBatch], moved: Sequence[Values]
) -> Iterator[Finding]:
    weights = component_weights(batches)
    spreads = {
        name: abs(weight)
        * float(np.concatenate([batch.center_by_group(batch.component(name)) for batch in batches]).std())
        for name, weight in weights.items()
    }
    largest = max(spreads, key=lambda name: spreads[name], default="")

    def lowered(moved: Sequence[Values]) -> dict[str, Agreement]:
        agreements = {
            name: agreement(batches, moved, partial(KeptBatch.component, name=name)) for name in weights
        }
        return {
            name: measured
            for name, measured in agreements.items()
            if spreads[name] > _SMALL_SHARE * spreads[largest]
            and np.sign(weights[name]) * measured.mean < -SURE * measured.error
        }

    if not lowered(moved):
        return
    # train on raw rewards: shaping must not be the cause
    harmed = lowered(train_on_half(facts, batches, lambda batch: batch.rewards))
    rest = (
        train_on_half(facts, batches, partial(KeptBatch.without, name=largest, weight=weights[largest]))
        if harmed
        else []
    )
    for name, with_it in harmed.items():
        without = agreement(batches, rest, partial(KeptBatch.component, name=name))
        if name == largest or np.sign(weights[name]) * without.mean < SURE * without.error:
            continue
        last = batches[-1].batch.step
        yield facts.finding(
            "component_outweighed",
            f"Training lowers `{name}` (correlation {with_it}). Without `{largest}` in the reward, training "
            f"raises it ({without})",
            f"`{largest}` has more weight, and it prefers other replies than `{name}`",
            f"if `{name}` is your goal, lower the weight of `{largest}`",
            evidence=[("the components of the rewards", facts.rollouts(last, "--json"))],
            confidence="possible",
            since=batches[0].batch.step,
            until=last,
            correlation=with_it.mean,
            without=without.mean,
        )


TESTS: Mapping[str, Sequence[Callable[[DiagnosisFacts], Iterator[Finding | str]]]] = {
    "model": (other_tokenizer,),
    "environment": (check_environments,),
    "reward": (rewards_learnable,),
    "advantage and loss": (updated_towards_rewards, replay_newest_step),
    "update": (train_at_zero_rate,),
    "sync": (sampler_against_weights,),
}
"""Tests of `--try`, by link."""
