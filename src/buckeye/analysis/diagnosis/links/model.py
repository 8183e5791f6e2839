"""Checks of the model: trained weights, its chat template, and prompts that reach it whole."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import takewhile

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts, Place, Result
from buckeye.analysis.diagnosis.prompts import prompt_tokens
from buckeye.monitor.learning_findings import PRETRAINED_LOGPROB, RANDOM_LOGPROB
from buckeye.monitor.verdicts import NEARLY_ALL

_SAMPLES = 40
_END = 40  # characters
_MOST_ALIKE = 0.5
_CERTAIN = -0.05  # nats
_MOST_MISMATCH = 0.1
HIGH_TEMPERATURE = 1.5
LOW_TEMPERATURE = 0.5
_NARROW_TOP_P = 0.5


def first_replies(facts: DiagnosisFacts) -> Result:
    """Find first replies of random tokens, or always the same reply, though the engine is right."""
    logprob, alike = (facts.early_mean(f"orchestrator/{name}") for name in ("logprob/mean", "batch/alike"))
    temperature = float(facts.run.setting("orchestrator.sampling.temperature") or 1.0)
    mismatch = facts.early_mean("trainer/mismatch_kl_fresh") or 0.0
    if logprob is None or mismatch > _MOST_MISMATCH or facts.is_mask_misplaced:
        return None
    measured, step = f"first replies have {logprob:.2f} nats a token", facts.batch_steps[0].number
    if logprob <= RANDOM_LOGPROB and temperature < HIGH_TEMPERATURE and not facts.has_risen:
        seen = f"{measured}, near those of random tokens (a pretrained model: above {PRETRAINED_LOGPROB:g})"
        return facts.finding("untrained", seen, step)
    is_cut_off = (facts.early_mean("orchestrator/is_truncated/mean") or 0.0) >= NEARLY_ALL
    is_certain = not is_cut_off and logprob > _CERTAIN and narrow_sampling(facts) is None
    if is_certain and (alike or 0.0) > _MOST_ALIKE:
        seen = f"at first {alike:.0%} of the groups had identical rollouts, at a probability near 1"
        return facts.finding("one_reply", seen, step)
    return f"{measured} (random weights: below {RANDOM_LOGPROB:g})"


def narrow_sampling(facts: DiagnosisFacts) -> str | None:
    """Return the sampling setting that leaves nearly only the most likely tokens; None without one."""
    limits = {"temperature": (0.0, LOW_TEMPERATURE), "top_k": (1, 2), "top_p": (0.0, _NARROW_TOP_P)}
    for name, (low, high) in limits.items():
        value = facts.run.setting(f"orchestrator.sampling.{name}")
        if value is not None and low <= value <= high:
            return f"{name} = {value:g}"
    return None


def no_assistant_header(facts: DiagnosisFacts) -> Result:
    """Find prompts without the assistant header of the chat template."""
    if facts.is_mask_misplaced or not facts.reply_header:
        return None
    without = [
        place
        for place, text in facts.read_prompts
        if not text.rstrip().endswith(facts.reply_header) and place not in facts.late_masks
    ]
    what = f"prompts without the header of a reply ({facts.reply_header!r})"
    return facts.share_finding(
        "no_assistant_header", without, len(facts.read_prompts), what, most=0.3, least=3, confidence="sure"
    )


def template_unfit(facts: DiagnosisFacts) -> Result:
    """Find prompts without the tokens that open a message in the model's tokenizer, if nothing is learned."""
    if facts.tokenizer is None or not facts.is_flat():
        return None
    added = facts.tokenizer.get_added_tokens_decoder()
    opening = {number: token.content for number, token in added.items() if _OPENING.fullmatch(token.content)}
    without, count = list[Place](), 0
    for place, sample, _ in facts.samples("task") if opening else ():
        count += 1
        if not np.isin(prompt_tokens(sample), list(opening)).any():
            without.append(place)
    what = f"prompts have no {' or '.join(opening.values())}, which open the messages of this tokenizer"
    return facts.share_finding("template_unfit", without, count, what, most=0.9, least=8)


def prompts_lost(facts: DiagnosisFacts) -> Result:
    """Find prompts that differ as messages, but are equal as tokens."""
    by_tokens, known = defaultdict[bytes, set[int]](set), set[tuple[int, ...]]()
    for place, sample, (prompt,) in facts.samples("prompt"):
        if place not in known and prompt is not None and sample.loss_mask.any():
            by_tokens[prompt_tokens(sample).tobytes()].add(prompt)
        known.add(place)
    prompts = set[int]().union(*by_tokens.values())
    lost = set[int]().union(*(equal for equal in by_tokens.values() if len(equal) > 1))
    if facts.is_mask_misplaced:
        return None
    places, what = [(facts.last,)] * len(lost), "prompts have the same tokens as another"
    return facts.share_finding(
        "prompts_lost", places, len(prompts), what, most=0.3, least=4, confidence="sure"
    )


def messages_cut(facts: DiagnosisFacts) -> Result:
    """Find messages of prompts whose beginning or end is not in the text that the model reads."""
    count, cut = 0, list[tuple[int, int]]()
    for rollout in facts.first_rollouts("train", _SAMPLES):
        read = "".join("".join(rollout.text).split())
        prompt = takewhile(lambda message: message.get("role") != "assistant", rollout.messages)
        texts = ["".join(text.split()) for one in prompt if isinstance(text := one.get("content"), str)]
        count += bool(read and texts)
        if read and any(text[:_END] not in read or text[-_END:] not in read for text in texts):
            cut.append((facts.early, rollout.group))
    what = "prompts are not whole in the text that the model reads"
    return facts.share_finding("messages_cut", cut, count, what, most=0.3, least=4)


def end_token(facts: DiagnosisFacts) -> Result:
    """Find truncated first replies that have an end token of another template in their text."""
    replies = [
        str(rollout.messages[-1].get("content"))
        for rollout in facts.first_rollouts("train", _SAMPLES)
        if rollout.truncated and rollout.messages
    ]
    ends = Counter(found[0] for reply in replies if (found := _END_TOKEN.search(reply)))
    token, hits = ends.most_common(1)[0] if ends else ("", 0)
    what = f"truncated replies contain {token}, which does not end them"
    places = [(facts.early,)] * hits
    return facts.share_finding("wrong_end_token", places, len(replies), what, most=0.4, least=8)


_END_TOKEN = re.compile(r"<\|(?:im_end|im_start|end\w*|eot_id|eom_id|eos)\|>|</s>|<end_of_turn>|<eos>")
"""End tokens of the chat templates of common model families."""

_OPENING = re.compile(r"<\|(?:im_start|start_header_id|start_of_role|start)\|>|<start_of_turn>")
"""Tokens that open a message in the chat templates of common model families."""

CHECKS = (first_replies, no_assistant_header, template_unfit, prompts_lost, messages_cut, end_token)
