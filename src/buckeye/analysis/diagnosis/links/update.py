"""Checks of the update: learning rate over time, optimizer, weight decay, and the size of policy changes."""

from __future__ import annotations

import itertools

import numpy as np
from safetensors import SafetensorError, safe_open

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.links.loss import LORA_ALPHA
from buckeye.analysis.diagnosis.statistics import mean_interval
from buckeye.base.storage import read_json
from buckeye.monitor.finding import Finding
from buckeye.monitor.learning_findings import find_fall
from buckeye.monitor.metrics import StepMetrics
from buckeye.monitor.rollback import rollback_advice
from buckeye.transport.checkpoint import list_checkpoints

_ENOUGH = 20
_AROUND = 2  # steps before and after a resume
_EARLY = 11  # steps: a policy that is uniform before this step has collapsed, not converged
_LEAST_SHARE = 0.3
_MOST_DECAY = 0.1
_MOST_DECAY_OF_A_RISE = 0.5
_LEAST_STEP = 0.004  # nats


def optimizer_state_lost(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a checkpoint whose optimizer has counted fewer steps than the trainer."""
    looked = 0
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
        if counted is None or info.step > facts.until:
            continue
        looked += 1
        if counted >= done - 0.5:
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
    return f"the optimizer counted all steps in {looked} checkpoints" if looked else None


def resume_lost(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a reward that falls at a resume."""
    steps = [step for step in facts.batch_steps if step.trained is not None]
    starts = [at for at in range(2, len(steps) - 1) if _attempt(steps[at]) != _attempt(steps[at - 1])]
    for at in starts:
        fall = find_fall([*steps[max(0, at - _AROUND) : at], *steps[at : at + _AROUND]], least=2)
        if fall is None or fall.step != steps[at - 1].number:
            continue
        return facts.finding(
            "resume_lost",
            f"The reward fell from {fall.reward:.3f} to {fall.last:.3f} when the run was resumed at step "
            f"{steps[at].number}",
            "the resume did not restore what was learned: other weights, or a reset state",
            "resume from an earlier checkpoint, and compare its weights with those that are served",
            evidence=[("where the run was resumed", facts.command("logs", "--events"))],
            since=steps[at].number,
        )
    return f"the reward kept its level at {len(starts)} resumes" if starts else None


def _attempt(step: StepMetrics) -> int:
    return int((step.trained or {}).get("attempt", 0))


def learning_rate_applied(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a schedule that keeps the applied learning rate far below its setting."""
    rates = facts.values("trainer/lr")
    setting = facts.run.setting("trainer.optim.lr")
    if not setting or len(rates) < 3:
        return None
    applied = np.array(list(rates.values())) / float(setting)
    share = float(applied.mean())
    measured = f"on average {share:.0%} of the set learning rate was applied"
    scheduler = facts.run.setting("trainer.scheduler") or {}
    rising = applied[-1] > 2 * applied[0] and applied[-1] >= applied.max()
    if share >= _LEAST_SHARE or (facts.has_risen and share > 0.1) or (rising and not facts.has_ended):
        return f"{measured} (at least {_LEAST_SHARE:.0%})"
    return facts.finding(
        "warmup_too_long" if rising else "learning_rate_decayed",
        f"{measured[0].upper()}{measured[1:]}, and {applied[-1]:.0%} in the last step",
        f"the warm-up of {scheduler.get('warmup')} steps is longer than the run"
        if rising
        else f"the schedule ({scheduler.get('type')}) lowers the learning rate to 0 too early",
        "set trainer.scheduler.warmup to a few percent of max_steps"
        if rising
        else "use the constant schedule, or a decay at the end of the run only",
        evidence=[("the learning rate by step", facts.metrics("lr"))],
        confidence="sure" if share < 0.1 else "likely",
        share=share,
    )


def weight_decay(facts: DiagnosisFacts) -> Finding | str | None:
    """Find weight decay that takes more than half of the weights, or a tenth in a run that does not learn.

    Decoupled decay multiplies the weights by 1 - lr * weight_decay in each step (Loshchilov and Hutter 2019).
    """
    rates = list(facts.values("trainer/lr").values())
    decay = facts.run.setting("trainer.optim.weight_decay")
    if not rates or decay is None:
        return None
    lost = 1.0 - float(np.prod(np.clip(1.0 - np.array(rates) * float(decay), 0.0, 1.0)))
    measured = f"weight decay took {lost:.2g} of the weights"
    if lost < (_MOST_DECAY_OF_A_RISE if facts.has_risen else _MOST_DECAY):
        return f"{measured} (at most {_MOST_DECAY})"
    return facts.finding(
        "weight_decay",
        f"{measured[0].upper()}{measured[1:]} in {len(rates)} steps",
        f"weight decay moves the weights more than the rewards do (trainer.optim.weight_decay = {decay:g})",
        "use a trainer.optim.weight_decay of 0 to 0.01",
        evidence=[("learning rate and gradient by step", facts.metrics("lr", "grad_norm"))],
        lost=lost,
    )


def learning_rate_too_low(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a policy that hardly moves though groups have spread and the reward does not rise.

    The policy's change is that of the log-probs of recurring tokens, or that recorded after updates.
    """
    spread = [step.value("orchestrator/batch/with_spread") or 0.0 for step in facts.batch_steps]
    warmup = facts.run.setting("trainer.scheduler.warmup") or 0
    moves = _moves(facts)
    if moves is None or len(facts.batch_steps) < 8 or facts.last < 2 * warmup:
        return None
    per_step, how = moves
    measured = f"a step changes log-probs by {per_step:.2g} nats ({how})"
    if np.mean(spread) < 0.3 or facts.has_risen or per_step > _LEAST_STEP:
        return measured
    rate, max_norm = facts.run.setting("trainer.optim.lr"), facts.run.setting("trainer.optim.max_norm")
    norms = list(facts.values("trainer/grad_norm").values())
    if facts.run.setting(LORA_ALPHA) == 0:
        rate = f"{rate}, and the adapter has alpha 0"
    clipped = max_norm and norms and np.median(norms) > 100 * max_norm
    return facts.finding(
        "updates_too_small" if clipped else "learning_rate_too_low",
        f"{measured[0].upper()}{measured[1:]}, though rewards differ in {np.mean(spread):.0%} of the groups",
        f"clipping scales the gradient down by {np.median(norms) / max_norm:.0f} "
        f"(trainer.optim.max_norm = {max_norm})"
        if clipped
        else f"the updates are too small to change anything (trainer.optim.lr = {rate})",
        "raise trainer.optim.max_norm" if clipped else "raise trainer.optim.lr by 3 to 10 times",
        evidence=[("reward, entropy and policy change", facts.metrics("reward/mean", "entropy", "update/"))],
        moved=per_step,
    )


def _moves(facts: DiagnosisFacts) -> tuple[float, str] | None:
    """Return an upper bound of the mean log-prob change per step in nats, and how it was measured."""
    recorded = list(facts.values("trainer/update/logprob_change").values())
    if len(recorded) >= 3:
        return float(np.mean(recorded)), "measured after updates"
    change = facts.tokens.changes
    steps = facts.last - facts.batch_steps[0].number if facts.batch_steps else 0
    if len(change) < _ENOUGH or steps < 1:
        return None
    high = float(np.sqrt(max(0.0, mean_interval(np.square(change.trainer), 3.0)[1])))
    return (high / steps if high <= 0.05 else 1.0), f"{len(change)} recurring tokens"


def learning_rate_too_high(facts: DiagnosisFacts) -> Finding | str | None:
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
    size = max(jumps.values(), default=float("nan"))
    listed = list(rewards.values())
    best, last = max(listed), float(np.mean(listed[-3:]))
    spread = [step.value("orchestrator/reward/std") or 0.0 for step in facts.batch_steps]
    counts = [step.value("orchestrator/batch/rollouts") or 0.0 for step in facts.batch_steps]
    error = 4 * max(spread) / np.sqrt(max(1.0, float(np.mean(counts))))
    gained = last > listed[0] + error and last > best - error
    far = [n for n, moved in jumps.items() if moved > 1.0]
    far = far if len(far) > 1 else []  # a single large change may be a step that was rolled back
    measured = f"entropy from {first:.2f} to {entropy[numbers[-1]]:.2f} nats"
    if gained or not (far or fallen is not None) or first < 0.05:
        return measured
    if not far and not early and last >= listed[0] - error:
        return measured
    since = min([*far, *([fallen] if fallen is not None else [])])
    rate = facts.run.setting("trainer.optim.lr")
    how = f"single updates move a fifth of the tokens by up to {size:.1f} nats"
    if not far:
        how = "all rollouts of a task are identical" if early else "sampling is nearly deterministic"
    return facts.finding(
        "learning_rate_too_high",
        f"From step {since} on {how}; {measured}, the reward from {listed[0]:.2f} to {last:.2f}",
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


CHECKS = (
    optimizer_state_lost,
    resume_lost,
    learning_rate_applied,
    weight_decay,
    learning_rate_too_low,
    learning_rate_too_high,
)
