"""Rules on the setup of a run: templates, loss, learning rate and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import is_below, mean_interval, rms, share_interval, slope_interval
from buckeye.analysis.diagnosis.templates import decode_tokens, generation_header
from buckeye.base.storage import read_json
from buckeye.monitor.finding import Finding
from buckeye.monitor.rollback import rollback_advice
from buckeye.transport.checkpoint import list_checkpoints

_ENOUGH = 20
_SAMPLES = 40
_EARLY = 11  # steps: a policy that is uniform before this step has collapsed, not converged


def no_assistant_header(facts: DiagnosisFacts) -> Finding | None:
    """Find prompts without the assistant header of the chat template."""
    if facts.model is None or not facts.batches:
        return None
    header = generation_header(facts.model)
    contexts = list[str]()
    for sample in facts.batches[-1].batch.samples[:_SAMPLES]:
        places = np.flatnonzero(sample.loss_mask)
        if len(places):
            text = decode_tokens(facts.model, sample.token_ids[: places[0]])
            contexts += [text] if text is not None else []
    if not header or not header.strip() or len(contexts) < 3:
        return None
    without = [text for text in contexts if not text.rstrip().endswith(header.strip())]
    if share_interval(len(without), len(contexts), 2.0)[0] < 0.3:
        return None
    step = facts.batches[-1].batch.step
    return facts.finding(
        "no_assistant_header",
        f"{len(without)} of {len(contexts)} prompts end without the header of a reply ({header.strip()!r})",
        "without the header the model continues the user's message instead of replying",
        "render prompts with add_generation_prompt, or add it to the model's chat_template.jinja",
        evidence=[
            (
                f"the last prompt ends with {contexts[-1][-40:]!r}",
                facts.rollouts(step, "--group", 0, "--rollout", 0),
            )
        ],
        confidence="sure",
        share=len(without) / len(contexts),
    )


def optimizer_state_lost(facts: DiagnosisFacts) -> Finding | None:
    """Find a checkpoint whose optimizer has counted fewer steps than the trainer."""
    for info in list_checkpoints(facts.run.path / "checkpoints"):
        folder = info.path / "trainer"
        try:
            progress = read_json(folder / "progress.json")
            left_out = int(progress.get("skipped", 0)) + int(progress.get("empty", 0))
            done = int(progress["step"]) - left_out
            with safe_open(folder / "optimizer.safetensors", "np") as file:
                names = [name for name in file.keys() if name.endswith(".step")]  # noqa: SIM118  not a mapping
                counted = max((float(file.get_tensor(name)) for name in names), default=None)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            continue
        if counted is None or counted >= done - 0.5 or info.step > facts.until:
            continue
        since = int(done - counted)
        return facts.finding(
            "optimizer_state_lost",
            f"In the checkpoint of step {info.step} the optimizer has counted only {counted:.0f} steps: "
            f"its state was reset at step {since}",
            "the resume did not restore the optimizer's state, so its first steps are too large",
            "resume from a checkpoint with the optimizer's state",
            evidence=[
                ("where the run was resumed", facts.command("logs", "--events")),
                ("gradient and reward around that step", facts.metrics("grad_norm", "reward/mean")),
            ],
            confidence="sure",
            since=since,
            counted=counted,
        )
    return None


def kl_of_the_wrong_sign(facts: DiagnosisFacts) -> Finding | None:
    """Find a loss that subtracts the KL penalty instead of adding it."""
    loss = facts.run.setting("trainer.loss") or {}
    coefficient, per_token = float(loss.get("kl_coef") or 0.0), loss.get("normalization", "token") == "token"
    if (
        not coefficient
        or not per_token
        or loss.get("entropy_coef")
        or loss.get("kl_estimator") not in (None, "k3")
    ):
        return None
    added, expected = list[float](), list[float]()
    for batch in facts.batches:
        kl = batch.record["values"].get("reference_kl")
        total = batch.record["values"].get("loss")
        mask = batch.column("loss_mask").astype(bool) & np.isfinite(batch.logprobs)
        if kl is None or total is None or not mask.any():
            continue
        ratios = np.exp(np.clip(batch.logprobs[mask] - batch.column("logprobs")[mask], -10, 10))
        policy = -float((ratios * batch.column("advantages")[mask]).sum()) / int(
            batch.column("loss_mask").sum()
        )
        added.append(total - policy)
        expected.append(coefficient * kl)
    low, high = slope_interval(np.array(expected), np.array(added), 2.0)
    if len(added) < 3 or high > -0.3 or rms(np.array(expected)) < 1e-6:
        return None
    return facts.finding(
        "kl_wrong_sign",
        f"The loss minus the policy-gradient loss is {low:.2f} to {high:.2f} times kl_coef x KL, not 1",
        "the KL penalty has the wrong sign, so it drives the policy away from the reference model",
        "check the sign of trainer.loss.kl_coef, and how the loss adds the KL term",
        evidence=[("the divergence by step", facts.metrics("reference_kl"))],
        confidence="sure" if high < -0.7 and low > -1.3 else "likely",
        slope=(low + high) / 2,
    )


_BOUNDS = (
    *("masked_low", "masked_high", "masked_sequence", "clipped_low", "clipped_high", "corrected_low"),
    "corrected_high",
)
"""Metric names for the shares of tokens that the loss leaves out."""


def _left_out(facts: DiagnosisFacts) -> list[float]:
    return [
        min(1.0, sum(step.value(f"trainer/{name}") or 0.0 for name in _BOUNDS))
        for step in facts.steps
        if step.value("trainer/trained_tokens")
    ]


def bounds_too_narrow(facts: DiagnosisFacts) -> Finding | None:
    """Find loss bounds that leave out most tokens though sampler and trainer agree."""
    shares = _left_out(facts)[-10:]
    mismatch = [
        step.value("trainer/mismatch_kl") for step in facts.steps if step.value("trainer/trained_tokens")
    ]
    known = [abs(value) for value in mismatch[-10:] if value is not None]
    narrow = _narrow(facts.run.setting("trainer.loss") or {})
    if len(shares) < 3 or not known or np.median(shares) < 0.3 or not (np.median(known) <= 0.02 or narrow):
        return None
    return facts.finding(
        "bounds_too_narrow",
        f"{np.median(shares):.0%} of the trained tokens are outside the bounds of the loss, at a mismatch "
        "of only "
        f"{np.median(known):.2g} nats",
        "the bounds of the ratio are too narrow: rounding alone moves tokens outside of them, so almost "
        "nothing is trained",
        "use the default bounds of trainer.loss (mask_ratio_low, mask_ratio_high, clip_low, clip_high)",
        evidence=[
            ("the excluded tokens", facts.metrics("masked_low", "masked_high")),
            ("the mismatch", facts.metrics("mismatch_kl")),
        ],
        confidence="sure",
        share=float(np.median(shares)),
    )


def _narrow(loss: Mapping[str, Any]) -> bool:
    """Return True if the upper bound of a ratio is within 0.01 of 1."""
    above = [
        loss.get("mask_ratio_high"),
        1.0 + loss["clip_high"] if loss.get("clip_high") is not None else None,
    ]
    return any(bound is not None and bound < 1.01 for bound in above)


def _moves(facts: DiagnosisFacts) -> tuple[np.ndarray, float] | None:
    """Return the trainer's log-prob changes of recurring tokens, and the number of steps of the run."""
    tokens = facts.tokens
    change = tokens.changes
    if len(change) < _ENOUGH or not facts.batch_steps:
        return None
    return change.trainer, float(facts.last - facts.batch_steps[0].number)


def learning_rate_too_low(facts: DiagnosisFacts) -> Finding | None:
    """Find a policy that hardly moves though groups have spread and the reward does not rise."""
    rewards = [reward for step in facts.batch_steps if (reward := step.sampled_reward) is not None]
    spread = [step.value("orchestrator/batch/with_spread") or 0.0 for step in facts.batch_steps]
    found = _moves(facts)
    warmup = facts.run.setting("trainer.scheduler.warmup") or 0
    if found is None or len(facts.batch_steps) < 8 or np.mean(spread) < 0.3 or facts.last < 2 * warmup:
        return None
    moved, steps = found
    half = len(rewards) // 2
    if is_below(rewards[:half], rewards[half:], 2.0):
        return None
    size = rms(moved)
    high = float(np.sqrt(max(0.0, mean_interval(np.square(moved), 3.0)[1])))
    if high > 0.05 or high / max(1.0, steps) > 0.004:
        return None
    rate = facts.run.setting("trainer.optim.lr")
    return facts.finding(
        "learning_rate_too_low",
        f"In {steps:.0f} steps with differing rewards the log-probs of the same tokens moved by "
        f"{size:.2g} nats",
        f"the updates are too small to change anything (trainer.optim.lr = {rate})",
        "raise trainer.optim.lr by 3 to 10 times",
        evidence=[
            (
                f"{len(moved)} tokens after the same text, at most {high:.2g} nats",
                facts.metrics("reward/mean", "entropy"),
            ),
        ],
        moved=size,
    )


def learning_rate_too_high(facts: DiagnosisFacts) -> Finding | None:
    """Find steps that move the policy far, without a higher reward afterward."""
    trained = [step for step in facts.steps if step.value("trainer/entropy") is not None]
    rewards = facts.values("orchestrator/reward/mean")
    if not trained or len(rewards) < 4:
        return None
    entropy = {step.number: float(step.value("trainer/entropy") or 0.0) for step in trained}
    numbers = list(entropy)
    first = entropy[numbers[0]]
    fallen = next((n for n in numbers[1:6] if entropy[n] < 0.25 * first), None)
    alike = facts.values("orchestrator/batch/alike")
    early = (
        [n for n in list(alike)[1:_EARLY] if alike[n] > 0.9] if min(alike.values(), default=1.0) < 0.1 else []
    )
    fallen = min([*early, *([fallen] if fallen is not None else [])], default=None)
    jumps = _jumps(facts)
    listed = list(rewards.values())
    best, last = max(listed), float(np.mean(listed[-3:]))
    spread = [step.value("orchestrator/reward/std") or 0.0 for step in facts.batch_steps]
    counts = [step.value("orchestrator/batch/rollouts") or 0.0 for step in facts.batch_steps]
    error = 4 * max(spread) / np.sqrt(max(1.0, float(np.mean(counts))))
    gained = last > listed[0] + error and last > best - error
    far = [n for n, size in jumps.items() if size > 1.0]
    far = far if len(far) > 1 else []  # a single large change may be a step that was rolled back
    if gained or not (far or fallen is not None) or first < 0.05:
        return None
    if not far and not early and last >= listed[0] - error:
        return None
    since = min([*far, *([fallen] if fallen is not None else [])])
    rate = facts.run.setting("trainer.optim.lr")
    size = max(jumps.values(), default=float("nan"))
    how = f"single updates move a fifth of the tokens by up to {size:.1f} nats"
    if not far:
        how = "all rollouts of a task are identical" if early else "sampling is nearly deterministic"
    return facts.finding(
        "learning_rate_too_high",
        f"From step {since} on {how}; entropy went from {first:.2f} to {entropy[numbers[-1]]:.2f}, the "
        f"reward from {listed[0]:.2f} to {last:.2f}",
        f"the updates are too large (trainer.optim.lr = {rate}), so the policy collapses",
        rollback_advice(facts.run.path, since),
        evidence=[
            ("entropy and reward", facts.metrics("entropy", "reward/mean")),
            ("the size of gradients", facts.metrics("grad_norm")),
        ],
        since=since,
        moved=size,
        entropy=entropy[numbers[-1]],
    )


def _jumps(facts: DiagnosisFacts) -> dict[int, float]:
    """Return, by step, the log-prob change in nats that a fifth of the tokens exceed since the last weights.

    The change is the trainer's log-prob minus that of a sampler one version older, or the change of recurring
    tokens.
    """
    tokens = facts.tokens
    found = dict[int, float]()
    old = np.isfinite(tokens.trainer) & (tokens.version == tokens.step - 1) & (tokens.version >= 0)
    for step in np.unique(tokens.step[old]):
        found[int(step)] = _change_of_a_fifth(tokens.logprob_gap[old & (tokens.step == step)])
    by_step = [np.flatnonzero(tokens.fresh & (tokens.step == step)) for step in np.unique(tokens.step)]
    for before, after in itertools.pairwise(by_step):
        moved = _moved(facts, before, after)
        if moved is not None:
            found[int(tokens.step[after[0]])] = moved
    return found


def _change_of_a_fifth(moved: np.ndarray) -> float:
    """Return the change that a fifth of the tokens exceed, so that a few unlikely tokens do not dominate."""
    return float(np.quantile(np.abs(moved), 0.8))


def _moved(facts: DiagnosisFacts, before: np.ndarray, after: np.ndarray) -> float | None:
    tokens = facts.tokens
    if not len(before) or not len(after) or tokens.step[after[0]] - tokens.step[before[0]] > 2:
        return None
    _, first, second = np.intersect1d(tokens.key[before], tokens.key[after], return_indices=True)
    if len(first) < _ENOUGH:
        return None
    return _change_of_a_fifth(tokens.trainer[after[second]] - tokens.trainer[before[first]])


def training_without_transfer(facts: DiagnosisFacts) -> Finding | None:
    """Find a training reward that rises while the reward on held-out tasks does not."""
    rows = facts.query(
        "SELECT step, avg(reward), count(reward) FROM rollouts WHERE split = 'eval' AND step <= {until} "
        "GROUP BY step"
    )
    rewards = [reward for step in facts.batch_steps if (reward := step.sampled_reward) is not None]
    if len(rows) < 2 or len(rewards) < 6 or min(row[2] for row in rows) < 10:
        return None
    third = max(2, len(rewards) // 3)
    if not is_below(rewards[:third], rewards[-third:], 3.0):
        return None
    first, last = (_evaluated(facts, rows[at][0]) for at in (0, -1))
    gained = float(np.mean(rewards[-third:]) - np.mean(rewards[:third]))
    low, high = mean_interval(last, 2.0)
    if float(np.mean(first)) + 0.3 * gained < high:
        return None
    return facts.finding(
        "no_transfer",
        f"Training gained {gained:.2f}, the held-out tasks {np.mean(last) - np.mean(first):.2f} "
        f"({low:.2f} to {high:.2f} "
        f"now, {np.mean(first):.2f} at the start)",
        "the policy does not generalize: a leak, a grader that can be gamed, or too few tasks",
        "read the rollouts with the highest rewards; `buckeye env check` finds leaks and gaming",
        evidence=[("training and evaluation by step", facts.metrics("reward/mean", 'eval/[^"]*'))],
        gained=gained,
    )


def _evaluated(facts: DiagnosisFacts, step: int) -> Sequence[float]:
    rows = facts.query(
        "SELECT reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step = ?", step
    )
    return [row[0] for row in rows]
