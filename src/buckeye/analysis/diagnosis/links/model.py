"""Checks of the model: trained weights, its chat template, and prompts that reach it whole."""

from __future__ import annotations

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.prompts import prompt_tokens
from buckeye.analysis.diagnosis.statistics import share_interval
from buckeye.analysis.diagnosis.templates import decode_tokens, generation_header
from buckeye.monitor.finding import Finding
from buckeye.monitor.learning_findings import PRETRAINED, RANDOM_LOGPROB
from buckeye.monitor.verdicts import NEARLY_ALL

_SAMPLES = 40
_MOST_ALIKE = 0.5
_CERTAIN = -0.05  # nats
_MOST_MISMATCH = 0.1
_HIGH_TEMPERATURE = 1.5
LOW_TEMPERATURE = 0.5
_MIN_PROMPTS = 4


def first_replies(facts: DiagnosisFacts) -> Finding | str | None:
    """Find first replies of random tokens, or always the same reply, though the engine is right."""
    logprob, alike = (facts.early_mean(f"orchestrator/{name}") for name in ("logprob/mean", "batch/alike"))
    temperature = float(facts.run.setting("orchestrator.sampling.temperature") or 1.0)
    if logprob is None or (facts.early_mean("trainer/mismatch_kl_fresh") or 0.0) > _MOST_MISMATCH:
        return None
    measured = f"first replies have {logprob:.2f} nats a token"
    evidence = [("the first replies", facts.rollouts(facts.batch_steps[0].number))]
    if logprob <= RANDOM_LOGPROB and temperature < _HIGH_TEMPERATURE and not facts.has_risen:
        return facts.finding(
            "untrained",
            f"{measured[0].upper()}{measured[1:]}: they are random tokens",
            "these weights are untrained",
            PRETRAINED,
            evidence=evidence,
            logprob=logprob,
        )
    is_cut_off = (facts.early_mean("orchestrator/is_truncated/mean") or 0.0) >= NEARLY_ALL
    if (
        not is_cut_off
        and logprob > _CERTAIN
        and (alike or 0.0) > _MOST_ALIKE
        and temperature > LOW_TEMPERATURE
    ):
        return facts.finding(
            "one_reply",
            f"At first {alike:.0%} of the groups had identical rollouts, at a probability near 1",
            "the model gives only one reply to a task, so there is nothing to compare: it was fine-tuned too "
            "far, or on replies that are all alike",
            "start from an earlier checkpoint of the fine-tuning, or from a model that was trained on varied "
            "replies",
            evidence=evidence,
        )
    return f"{measured} (random weights: below {RANDOM_LOGPROB:g})"


def no_assistant_header(facts: DiagnosisFacts) -> Finding | str | None:
    """Find prompts without the assistant header of the chat template."""
    if facts.model is None or not facts.batches or facts.is_mask_misplaced:
        return None
    header = generation_header(facts.model)
    contexts = list[str]()
    for sample in facts.batches[-1].batch.samples[:_SAMPLES]:
        if sample.loss_mask.any():
            text = decode_tokens(facts.model, prompt_tokens(sample))
            contexts += [text] if text is not None else []
    if not header or not header.strip() or len(contexts) < 3:
        return None
    without = [text for text in contexts if not text.rstrip().endswith(header.strip())]
    if share_interval(len(without), len(contexts), 2.0)[0] < 0.3:
        return f"{len(without)} of {len(contexts)} prompts without the header of a reply (at most 30 %)"
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


def prompts_lost(facts: DiagnosisFacts) -> Finding | str | None:
    """Find prompts that differ as messages, but are equal as tokens."""
    by_tokens = dict[bytes, set[int]]()
    for batch in facts.batches:
        asked = {
            (group, number): prompt
            for group, number, prompt in facts.query(
                "SELECT grp, number, prompt FROM rollouts WHERE split = 'train' AND step = ? AND retried = 0 "
                "AND dropped IS NULL AND prompt IS NOT NULL",
                batch.batch.step,
            )
        }
        for sample, (group, number, segment, _) in zip(batch.batch.samples, batch.origins, strict=False):
            if segment == 0 and sample.loss_mask.any() and (group, number) in asked:
                by_tokens.setdefault(prompt_tokens(sample).tobytes(), set()).add(asked[group, number])
    prompts = set[int]().union(*by_tokens.values())
    lost = {prompt for of in by_tokens.values() if len(of) > 1 for prompt in of}
    if len(prompts) < _MIN_PROMPTS or facts.is_mask_misplaced:
        return None
    measured = f"{len(lost)} of {len(prompts)} prompts have the same tokens as another"
    if share_interval(len(lost), len(prompts), 2.0)[0] < 0.3:
        return f"{measured} (at most 30 %)"
    step = facts.batches[-1].batch.step
    return facts.finding(
        "prompts_lost",
        measured,
        "the model does not see what tells the tasks apart: the chat template drops it, or a limit on the "
        "prompt",
        "compare `text` (what the model sees) with `messages`; check chat_template.jinja",
        evidence=[("texts and messages", facts.rollouts(step, "--json"))],
        confidence="sure",
        share=len(lost) / len(prompts),
    )


CHECKS = (first_replies, no_assistant_header, prompts_lost)
