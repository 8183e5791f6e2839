"""Rows of the running sequences, compared with a plain dictionary."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buckeye.inference.engine.sequences import RunningSequences, Sequence
from buckeye.inference.types import SamplingParams

MAX_LEN = 24


class Books(RuleBasedStateMachine):
    """Sequences are added, grow and are removed; every row must keep the values of its sequence."""

    @initialize(slots=st.integers(1, 5))
    def start(self, slots):
        self.running = RunningSequences(slots, MAX_LEN)
        self.expected: dict[Sequence, tuple[list[int], list[float]]] = {}

    @precondition(lambda self: self.running.free_slots)
    @rule(
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        max_tokens=st.integers(1, 30),
        stops=st.lists(st.integers(0, 9), max_size=3, unique=True),
        min_tokens=st.integers(0, 3),
        seed=st.integers(-(2**63), 2**64),
    )
    def add(self, prompt, max_tokens, stops, min_tokens, seed):
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=tuple(stops), min_tokens=min_tokens, seed=seed
        )
        sequence = Sequence(tuple(prompt), params)
        self.running.add(sequence)
        self.expected[sequence] = ([], [])

    @precondition(lambda self: len(self.running))
    @rule(data=st.data())
    def remove(self, data):
        slot = data.draw(st.integers(0, len(self.running) - 1))
        sequence = self.running.sequences[slot]
        self.running.remove(slot)
        del self.expected[sequence]
        assert sequence.slot == -1

    @precondition(lambda self: len(self.running))
    @rule(data=st.data())
    def sample(self, data):
        count = len(self.running)
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        order = list(self.running.sequences)
        ended = self.running.record(np.array(tokens), -np.arange(count, dtype=np.float64))
        assert ended == sorted(ended, reverse=True)
        for slot, (sequence, token) in enumerate(zip(order, tokens, strict=True)):
            sampled, logprobs = self.expected[sequence]
            sampled.append(token)
            logprobs.append(-float(slot))
            stopped = token in sequence.params.stop_token_ids
            full = (
                len(sampled) >= sequence.params.max_tokens
                or len(sampled) + len(sequence.prompt_ids) >= MAX_LEN
            )
            assert (slot in ended) == (stopped or full)
            if slot in ended:
                assert self.running.finish_reason(slot) == ("stop" if stopped else "length")
        for slot in ended:
            del self.expected[self.running.sequences[slot]]
            self.running.remove(slot)

    @invariant()
    def rows_tell_the_truth(self):
        running = self.running
        assert set(running.sequences) == set(self.expected)
        assert running.free_slots == running.slots - len(self.expected)
        early = set()
        for slot, sequence in enumerate(running.sequences):
            sampled, logprobs = self.expected[sequence]
            text = [*sequence.prompt_ids, *sampled]
            assert sequence.slot == slot
            assert running.results(slot) == (sampled, logprobs)
            assert running.tokens[slot, : len(text)].tolist() == text
            assert running.position[slot] == len(text) - 1
            assert running.last_token[slot] == text[-1]
            if len(sampled) < sequence.params.min_tokens:
                early |= {(slot, token) for token in sequence.params.stop_token_ids}
        rows, tokens = running.forbidden_tokens()
        assert set(zip(rows.tolist(), tokens.tolist(), strict=True)) == early


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestBooks = Books.TestCase


def test_version_spans_omit_versions_without_tokens():
    sequence = Sequence((1,), SamplingParams(max_tokens=9))
    sequence.version_starts = [(0, 0), (1, 0), (2, 3), (3, 5)]
    sequence.token_ids, sequence.logprobs = [7] * 5, [0.0] * 5
    assert sequence.version_spans() == [(1, 0, 3), (2, 3, 5)]
