"""Input of the checks: a run up to a step, with lazily loaded parts."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from buckeye.analysis.diagnosis.prompts import prompt_tokens
from buckeye.analysis.diagnosis.statistics import is_below, rms, share_interval
from buckeye.analysis.diagnosis.token_facts import TokenFacts, token_facts
from buckeye.base.columns import quoted
from buckeye.base.explanations import list_items
from buckeye.inference.render.template_files import read_template
from buckeye.monitor.conversation import prompt_text
from buckeye.monitor.finding import (
    BLANK,
    Confidence,
    Evidence,
    Finding,
    advice_of,
    as_clause,
    cause_of,
    fill_blanks,
)
from buckeye.monitor.learning_findings import Outcome, findings, outcome_of
from buckeye.monitor.metrics import StepMetrics
from buckeye.monitor.rollouts import RecordedRollout
from buckeye.runs import Run
from buckeye.runs.trained_step import TrainedStep
from buckeye.transport.batches import Sample

_MOST_TEXTS = 40
_MOST_STEPS = 14
"""Maximum number of kept batches with tokens to inspect: the first, the last, and some between."""
_DTYPES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
_DTYPE_SETTINGS = ("trainer.model.compute_dtype", "trainer.weights.dtype", "inference.model.dtype")
_EARLY = 3  # steps
_MIN_CLEAR = 10  # tokens
_COMPARED = 40  # prompts

_TRAINED = "split = 'train' AND retried = 0 AND reward IS NOT NULL AND step <= {until}"
_EVALUATED = "split = 'eval' AND reward IS NOT NULL AND step <= {until}"
LONG = 20  # steps
"""Number of steps after which a run should have learned something."""
LEAST_TRAINED = 0.7
"""Least share of the sampled tokens in the loss mask."""
RECENT = 10
"""Number of the last steps that describe the present state of a run."""

Place = tuple[int, int, int]
"""Step, group and number of a rollout."""

Result = Finding | str | None
"""Result of a check: a finding; or the measured quantity with its reference range; or None if the run has not
recorded enough to measure it.
"""


@dataclass(frozen=True)
class DiagnosisFacts:
    """Data of a run up to step `until`, for the checks."""

    run: Run
    until: int = sys.maxsize

    @cached_property
    def steps(self) -> list[StepMetrics]:
        """Recorded steps."""
        return [step for step in self.run.steps if step.number <= self.until]

    @cached_property
    def batch_steps(self) -> list[StepMetrics]:
        """Recorded steps with batch metrics."""
        return [step for step in self.steps if step.value("orchestrator/reward/mean") is not None]

    @cached_property
    def early(self) -> int:
        """Last of the first steps. An update cannot cause a fault there."""
        return self.batch_steps[:_EARLY][-1].number if self.batch_steps else 0

    @cached_property
    def first_third(self) -> int:
        """Last of the first third of the steps. Later steps may be consequences of a fault."""
        return max(self.early, self.last // 3)

    @cached_property
    def has_risen(self) -> bool:
        """True if the reward of the last batches is significantly higher than that of the first ones."""
        return self.outcome is not None and self.outcome.has_risen

    @cached_property
    def outcome(self) -> Outcome | None:
        """Change of the reward; None without two batches."""
        return outcome_of(self.steps)

    def is_flat(self, least: float = 0) -> bool:
        """Return True if the reward has not risen in at least `least` steps, with tasks left to solve."""
        return self.outcome is not None and self.outcome.is_flat and self.outcome.steps >= least

    def early_mean(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps; None if it is not recorded."""
        known = [value for step, value in self.values(name).items() if step <= self.early]
        return float(np.mean(known)) if known else None

    @cached_property
    def metric_findings(self) -> Sequence[Finding]:
        """Findings from the metrics alone."""
        return findings(self.steps, self.run.path, has_ended=self.has_ended)

    @cached_property
    def has_ended(self) -> bool:
        """True if all steps of the run are done."""
        return self.last + 1 >= (self.run.setting("trainer.max_steps") or math.inf)

    def values(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step."""
        return {step.number: value for step in self.steps if (value := step.value(name)) is not None}

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return rows of the index.

        In the query, `{trained}` and `{evaluated}` are conditions for rollouts with a reward, and `{until}`
        is the last step to include.
        """
        sql = sql.replace("{trained}", _TRAINED).replace("{evaluated}", _EVALUATED)
        return self.run.query(sql.replace("{until}", str(self.until)), *values)

    def rollouts(
        self, where: str, *values: Any, columns: str = "NULL"
    ) -> Iterator[tuple[RecordedRollout, list[Any]]]:
        """Yield the readable rollouts of a query, with further `columns` of the index.

        `where` is the query after `WHERE`, as in `query`.
        """
        sql = f"SELECT path, at, bytes, grp, number, {columns} FROM rollouts WHERE {where}"  # noqa: S608  constant
        for *place, row in ((*row[:5], list(row[5:])) for row in self.query(sql, *values)):
            rollout = self.run.text_at(*place)
            if rollout is not None:
                yield rollout, row

    @cached_property
    def evaluations(self) -> list[list[float]]:
        """Rewards of each evaluation, in order; none if the evaluations are of other tasks than training."""
        if self.evaluates_other_tasks:
            return []
        found = dict[int, list[float]]()
        for step, reward in self.query("SELECT step, reward FROM rollouts WHERE {evaluated} ORDER BY step"):
            found.setdefault(step, []).append(reward)
        return list(found.values())

    @cached_property
    def evaluates_other_tasks(self) -> bool:
        """True if evaluations have other environments than training, and lack most of its common words."""
        trained, evaluated = (
            {env for (env,) in self.query("SELECT DISTINCT env FROM rollouts WHERE split = ?", split)}
            for split in ("train", "eval")
        )
        if not evaluated or trained & evaluated:
            return False
        train, other = (
            [set(prompt_text(one.messages).split()) for one in self.first_rollouts(split, _COMPARED)]
            for split in ("train", "eval")
        )
        counts = Counter(chain.from_iterable(train))
        common = {word for word, count in counts.items() if count > 0.5 * len(train)}
        return len(common & set().union(*other)) < 0.5 * len(common)

    @cached_property
    def last(self) -> int:
        """Last step with a batch; 0 without any step. The final evaluation has a higher number."""
        return (self.batch_steps or self.steps)[-1].number if self.steps else 0

    @cached_property
    def batches(self) -> list[TrainedStep]:
        """Sample of the kept batches, in order."""
        kept = [step for step in self.run.kept_steps if step <= self.until]
        if len(kept) > _MOST_STEPS:
            places = np.linspace(0, len(kept) - 1, _MOST_STEPS - 4).round().astype(int)
            kept = sorted({*kept[:2], *kept[-2:], *(kept[place] for place in places)})
        return [found for step in kept if (found := self.run.trained(step)) is not None]

    @cached_property
    def evaluation_lags(self) -> bool:
        """True if the training reward rises and the evaluation's does not."""
        rewards = self.evaluations
        return len(rewards) > 1 and self.has_risen and not is_below(rewards[0], rewards[-1], 2.0)

    @cached_property
    def is_memorizing(self) -> bool:
        """True if held-out tasks gained less than 70 % of the gain in training, by 1.5 standard errors."""
        if len(self.evaluations) < 2 or self.outcome is None or not self.has_risen:
            return False
        first, last = (np.array(self.evaluations[at]) for at in (0, -1))
        error = math.hypot(*(float(values.std()) / math.sqrt(len(values)) for values in (first, last)))
        gained = float(last.mean() - first.mean())
        return gained + 1.5 * error < 0.7 * (self.outcome.last - self.outcome.first)

    def first_rollouts(self, split: str, count: int) -> list[RecordedRollout]:
        """Return one rollout for each of the first `count` different prompts of a split."""
        where = (
            "split = ? AND step <= {until} AND prompt IS NOT NULL GROUP BY prompt ORDER BY step, grp LIMIT ?"
        )
        return [rollout for rollout, _ in self.rollouts(where, split, count, columns="min(step)")]

    def samples(
        self, columns: str, batches: Sequence[TrainedStep] | None = None
    ) -> Iterator[tuple[Place, Sample, tuple[Any, ...]]]:
        """Yield the samples of batches (default: `batches`) with their places, and columns of the index."""
        for kept in self.batches if batches is None else batches:
            rows = self.query(
                f"SELECT grp, number, {columns} FROM rollouts "  # noqa: S608  constant
                "WHERE {trained} AND dropped IS NULL AND step = ?",
                kept.batch.step,
            )
            known = {row[:2]: row[2:] for row in rows}
            for sample, origin in zip(kept.batch.samples, kept.origins, strict=False):
                if origin[:2] in known:
                    yield (kept.batch.step, *origin[:2]), sample, known[origin[:2]]

    @cached_property
    def tokens(self) -> TokenFacts:
        """Trained tokens of `batches`."""
        return token_facts(self.batches)

    @cached_property
    def rounding_tolerance(self) -> float:
        """Rounding tolerance between two computations of a log-prob, in nats, from the dtypes."""
        names = {str(self.run.setting(name)) for name in _DTYPE_SETTINGS}
        names |= {str(batch.record.get("dtype")) for batch in self.batches}  # for the setting "auto"
        known = [_DTYPES[name] for name in names if name in _DTYPES]
        devices = {self.run.setting("trainer.model.device"), *(b.record.get("device") for b in self.batches)}
        return max(known, default=_DTYPES["float32" if "cpu" in devices else "bfloat16"])

    @cached_property
    def is_mask_misplaced(self) -> bool:
        """True if the loss mask does not separate prompts from replies: it is misplaced, or lacks tokens."""
        return self.tokens.is_misplaced(self.rounding_tolerance) or self.trained_share < LEAST_TRAINED

    @cached_property
    def is_sampler_stale(self) -> bool:
        """True if recurring tokens kept the sampler's log-probs over versions, and not the trainer's."""
        sampler, trainer, _ = self.tokens.changes_at_any_age
        clear = np.abs(trainer) > max(20 * self.rounding_tolerance, 0.1)
        unmoved = np.abs(sampler[clear]) <= self.rounding_tolerance
        return clear.sum() >= _MIN_CLEAR and share_interval(int(unmoved.sum()), len(unmoved), 2.0)[0] > 0.6

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the run; None if it cannot be read."""
        folder = self.run.tokenizer_directory
        try:
            return None if folder is None else Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises no narrower class
            return None

    @cached_property
    def reply_header(self) -> str:
        """Header of a reply in the chat template of the run, without whitespace around it; "" if unknown."""
        folder = self.run.tokenizer_directory
        try:
            template = None if folder is None else read_template(folder)
        except Exception:  # the library raises no narrower class
            return ""
        return (template.header or "").strip() if template is not None else ""

    @cached_property
    def read_prompts(self) -> list[tuple[Place, str]]:
        """Places and texts of prompts of the last batch, from their tokens; none without a known header."""
        if not self.reply_header or self.tokenizer is None or not self.batches:
            return []
        last = self.batches[-1]
        places = [origin[:2] for origin in last.origins] or [(0, 0)] * len(last.batch.samples)
        known = [at for at, sample in enumerate(last.batch.samples[:_COMPARED]) if sample.loss_mask.any()]
        prompts = [prompt_tokens(last.batch.samples[at]).tolist() for at in known]
        texts = self.tokenizer.decode_batch(prompts, skip_special_tokens=False)
        return [((last.batch.step, *places[at]), text) for at, text in zip(known, texts, strict=True)]

    @cached_property
    def late_masks(self) -> list[Place]:
        """Places of `read_prompts` that end with the header and the beginning of a recorded reply.

        Its first tokens are then not in the loss mask.
        """
        ends = {place: text.rpartition(self.reply_header) for place, text in self.read_prompts}
        begun = {place: end.strip() for place, (_, header, end) in ends.items() if header and end.strip()}
        return [place for place, text in begun.items() if self._has_reply_with(place, text)]

    def _has_reply_with(self, place: Place, beginning: str) -> bool:
        """Return True if a reply of the rollout at a place begins with a text."""
        return any(
            message.get("role") == "assistant" and str(message.get("content")).lstrip().startswith(beginning)
            for rollout, _ in self.rollouts("{trained} AND step = ? AND grp = ? AND number = ?", *place)
            for message in rollout.messages
        )

    @cached_property
    def recorded_share(self) -> float:
        """Number of recorded tokens of some complete replies, relative to the tokens of their texts."""
        if self.tokenizer is None:
            return 1.0
        where = "{trained} AND turns = 1 AND NOT truncated AND NOT cut ORDER BY step LIMIT ?"
        found = self.rollouts(where, _MOST_TEXTS, columns="completion_tokens")
        texts = [
            (str(one.messages[-1].get("content")), count or 0) for one, (count,) in found if one.messages
        ]
        # replies with invalid bytes have other tokens than their texts
        known = [(text, count) for text, count in texts if "\ufffd" not in text]
        encodings = self.tokenizer.encode_batch([text for text, _ in known], add_special_tokens=False)
        encoded = sum(len(encoding.ids) for encoding in encodings)
        return sum(count for _, count in known) / encoded if encoded else 1.0

    @cached_property
    def trained_share(self) -> float:
        """Share of the sampled tokens of complete replies in the loss mask; 1 without such replies."""
        trained, sampled = 0, dict[Place, int]()
        for place, sample, (is_incomplete, count) in self.samples("truncated OR cut, completion_tokens"):
            if not is_incomplete:
                trained += int(sample.loss_mask.sum())
                sampled[place] = count
        count = sum(sampled.values())
        return min(1.0, self.recorded_share) * (trained / count if count else 1.0)

    @cached_property
    def measured_tolerance(self) -> float:
        """Tolerance in nats, measured on the first weights; at most `rounding_tolerance`."""
        first = self.tokens.initial_logprob_gap()
        if len(first) < 20:
            return self.rounding_tolerance
        return min(self.rounding_tolerance, max(1e-5, 5 * rms(first)))

    def finding(
        self,
        name: str,
        seen: str,
        *place: int,
        confidence: Confidence = "likely",
        since: int | None = None,
        until: int | None = None,
        cause: str = "",
        advice: str = "",
        **words: str,
    ) -> Finding:
        """Return a finding with cause, advice and evidence from its section in `explanations.md`.

        `place` is the step (default: the last one), the group and the rollout in the commands of the
        evidence, and `words` has other values in them. Evidence with an unknown value is left out.
        """
        until = self.last if until is None else until
        places = zip("NGR", place or (self.last,), strict=False)
        values = {"RUN": quoted(self.run.path), **{key: str(number) for key, number in places}}
        values |= {key.upper(): shlex.quote(word) for key, word in words.items()}
        items = (item.removesuffix("`").partition(": `") for item in list_items(name, "Evidence"))
        evidence = tuple(
            Evidence(fact=as_clause(fact), command=fill_blanks(command, values))
            for fact, _, command in items
            if set(BLANK.findall(command)) <= values.keys()
        )
        known = {key: value for key, value in values.items() if key in ("RUN", "N")}
        return Finding(
            name=name,
            since=min(until, (self.steps[0].number if self.steps else 0) if since is None else since),
            until=until,
            seen=seen[:1].upper() + seen[1:],
            figures={},
            cause=cause or cause_of(name),
            advice=advice or advice_of(name, known),
            command=evidence[0].command,
            confidence=confidence,
            evidence=evidence,
        )

    def share_finding(
        self,
        name: str,
        places: Sequence[tuple[int, ...]],
        count: int,
        what: str,
        *,
        most: float,
        least: int,
        errors: float = 2.0,
        confidence: Confidence = "likely",
        task: str = "",
    ) -> Result:
        """Return a finding if more than a share `most` of `count` cases are at `places`, by `errors` errors.

        `what` is the rest of the sentence on these cases. None with fewer than `least` cases.
        """
        if count < least:
            return None
        seen = f"{len(places)} of {count} {what}"
        if share_interval(len(places), count, errors)[0] < most:
            return f"{seen} (at most {100 * most:.0f} %)"
        return self.finding(name, seen, *places[0], confidence=confidence, task=task)
