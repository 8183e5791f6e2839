"""Continuous batching: scheduling, pauses, weight updates and finish reasons."""

import threading

import pytest
import torch

from buckeye.inference.engine.weights import Checkpoint

from .conftest import MAX_LEN, PROMPT, finish, make_engine, near, sample


@pytest.fixture
def engine(qwen3):
    return make_engine(qwen3.directory)


def steps(engine, count):
    for _ in range(count):
        engine.step()


def done(engine, future):
    """Run engine steps until the future is done, and return its result."""
    engine.step()
    return future.result(timeout=0)


def test_identical_prompts_are_computed_once_and_sampled_separately(qwen3, engine):
    group = [sample(seed=i) for i in range(5)]
    finish(engine, *group)
    assert engine.counters["prefill_tokens"] == len(PROMPT) - 1
    assert engine.counters["prompt_tokens"] == 5 * len(PROMPT)
    assert len({tuple(s.token_ids) for s in group}) == 5
    for member in group:
        expected = qwen3.logprobs(PROMPT, member.token_ids)
        assert torch.tensor(member.logprobs) == near(expected)
        alone = sample(seed=member.params.seed)
        finish(make_engine(qwen3.directory), alone)
        assert alone.token_ids == member.token_ids
        assert alone.logprobs == near(member.logprobs)


def test_late_sibling_copies_the_prompt_of_a_running_one(qwen3, engine):
    first, late = sample(seed=1), sample(seed=2)
    engine.submit([first])
    steps(engine, 5)
    finish(engine, late)
    assert engine.counters["prefill_tokens"] == len(PROMPT) - 1
    assert torch.tensor(late.logprobs) == near(qwen3.logprobs(PROMPT, late.token_ids))


def test_more_sequences_than_slots_and_ragged_ends(qwen3):
    engine = make_engine(qwen3.directory, slots=3)
    sequences = [sample(PROMPT[i % 4 : 4 + i], seed=i, max_tokens=1 + (7 * i) % 11) for i in range(1, 20)]
    finish(engine, *sequences)
    for s in sequences:
        assert s.finish_reason == "length"
        assert len(s.token_ids) == s.params.max_tokens
        assert torch.tensor(s.logprobs) == near(qwen3.logprobs(s.prompt_ids, s.token_ids))
    assert not engine.running.sequences
    assert not engine._running_prompts._sequences


def test_equal_batches_give_equal_bits_after_any_traffic(qwen3):
    def wave():
        return [sample(PROMPT[: 5 + i % 7], seed=i, temperature=0.9) for i in range(20)]

    first, second = wave(), wave()
    finish(make_engine(qwen3.directory), *first)
    engine = make_engine(qwen3.directory)
    finish(engine, sample(PROMPT[3:9], seed=99), sample(PROMPT, max_tokens=60))
    finish(engine, *second)
    assert [(s.token_ids, s.logprobs) for s in first] == [(s.token_ids, s.logprobs) for s in second]


def test_randomness_does_not_depend_on_the_neighbours(qwen3):
    alone = sample(seed=5)
    finish(make_engine(qwen3.directory), alone)
    among = sample(seed=5)
    others = [sample(PROMPT[i:], seed=i, temperature=0.5, top_p=0.5) for i in range(1, 7)]
    finish(make_engine(qwen3.directory), *others[:3], among, *others[3:])
    assert among.token_ids == alone.token_ids


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(qwen3, engine):
    free = sample(seed=4)
    finish(engine, free)
    stop = free.token_ids[6]
    stopped = sample(seed=4, stop_token_ids=(stop, 319, 318))
    finish(engine, stopped)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_stop_tokens_are_not_sampled_before_min_tokens(qwen3, engine):
    free = sample(seed=4)
    finish(engine, free)
    stops = tuple(set(free.token_ids[:8]))
    held = sample(seed=4, stop_token_ids=stops, min_tokens=12)
    finish(engine, held)
    assert len(held.token_ids) >= 12
    assert not set(held.token_ids[:12]) & set(stops)
    allowed = qwen3.next_logprobs(PROMPT, held.token_ids)[0]
    allowed[list(stops)] = float("-inf")
    assert held.logprobs[0] == near(allowed.log_softmax(-1)[held.token_ids[0]].item())


def test_the_end_of_the_context_ends_a_sequence(qwen3, engine):
    sequence = sample(max_tokens=10_000)
    finish(engine, sequence)
    assert sequence.finish_reason == "length"
    assert len(sequence.prompt_ids) + len(sequence.token_ids) == MAX_LEN
    expected = qwen3.logprobs(PROMPT, sequence.token_ids)
    assert torch.tensor(sequence.logprobs) == near(expected)


def swap(engine, model, version, **settings):
    engine.pause("keep")
    installed = engine.install_weights(Checkpoint(model.directory), version, **settings)
    engine.resume()
    done(engine, installed)


def test_new_weights_keep_the_cache_of_running_sequences(make_model, engine):
    """Their keys are those of the old weights. A new sequence with their prompt does not reuse these keys."""
    new = make_model("qwen3", seed=1)
    running, later = sample(seed=1), sample(seed=2)
    engine.submit([running])
    steps(engine, 8)
    prefilled = engine.counters["prefill_tokens"]
    swap(engine, new, 17, keep_kv_cache=True)
    finish(engine, later)
    assert engine.counters["prefill_tokens"] == prefilled + len(PROMPT) - 1
    assert later.logprobs == near(new.logprobs(PROMPT, later.token_ids).tolist())
    assert running.logprobs[8:] != near(new.logprobs(PROMPT, running.token_ids)[8:].tolist())


def test_new_weights_in_mid_generation(make_model, engine):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    sequences = [sample(seed=1), sample(seed=2), sample(PROMPT[:7], seed=3, temperature=0.0)]
    engine.submit(sequences)
    steps(engine, 8)
    swap(engine, new, 17)
    late = sample(seed=4)
    finish(engine, late)
    for s in sequences:
        assert s.version_spans() == [(0, 0, 8), (17, 8, 20)]
        expected = torch.cat(
            [old.logprobs(s.prompt_ids, s.token_ids)[:8], new.logprobs(s.prompt_ids, s.token_ids)[8:]]
        )
        # the later log-probs are those of the new weights on the whole text: no old keys and values are left
        assert torch.tensor(s.logprobs) == near(expected)
    assert late.version_spans() == [(17, 0, 20)]
    assert torch.tensor(late.logprobs) == near(new.logprobs(PROMPT, late.token_ids))


def test_two_updates_in_one_pause_leave_no_trace_of_the_first(make_model, engine):
    sequence = sample(seed=1)
    engine.submit([sequence])
    steps(engine, 3)
    engine.pause("keep")
    done(engine, engine.install_weights(Checkpoint(make_model("qwen3", seed=1).directory), 1))
    done(engine, engine.install_weights(Checkpoint(make_model("qwen3").directory), 2))
    engine.resume()
    finish(engine)
    assert sequence.version_spans() == [(0, 0, 3), (2, 3, 20)]
    expected = make_model("qwen3").logprobs(PROMPT, sequence.token_ids)
    assert torch.tensor(sequence.logprobs) == near(expected)


def test_pause_keep_freezes_and_queues(engine):
    running, queued = sample(), sample(seed=1)
    engine.submit([running])
    steps(engine, 3)
    done(engine, engine.pause("keep"))
    engine.submit([queued])
    steps(engine, 5)
    assert engine.is_paused
    assert engine.counters["generation_tokens"] == 3
    engine.resume()
    finish(engine)
    assert (running.finish_reason, queued.finish_reason) == ("length", "length")


def test_pause_wait_finishes_running_and_admits_none(engine):
    running, queued = sample(), sample(seed=1)
    engine.submit([running])
    steps(engine, 3)
    paused = engine.pause("wait")
    engine.submit([queued])
    engine.step()
    assert not paused.done()
    while engine.step():
        pass
    assert paused.done()
    assert running.finish_reason == "length"
    assert queued.finish_reason is None
    engine.resume()
    finish(engine)
    assert queued.finish_reason == "length"


def test_pause_abort_ends_everything_and_keeps_tokens(qwen3):
    engine = make_engine(qwen3.directory, slots=1)
    running, waiting = sample(), sample(seed=1)
    engine.submit([running, waiting])
    steps(engine, 4)
    done(engine, engine.pause("abort"))
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert len(running.token_ids) == len(running.logprobs) == 4
    assert waiting.version_spans() == waiting.token_ids == []


def test_an_aborted_sequence_frees_its_slot(qwen3):
    engine = make_engine(qwen3.directory, slots=2)
    sequences = [sample(seed=i) for i in range(3)]
    engine.submit(sequences)
    steps(engine, 2)
    engine.abort([sequences[0]])
    finish(engine)
    engine.abort(sequences)  # aborting finished sequences does nothing
    engine.step()
    assert [s.finish_reason for s in sequences] == ["abort", "length", "length"]
    expected = qwen3.logprobs(PROMPT, sequences[1].token_ids)
    assert torch.tensor(sequences[1].logprobs) == near(expected)


@pytest.mark.parametrize(("method", "begun"), [("prefill", 0), ("decode", 2)])
def test_failing_step_ends_running_sequences_only(engine, monkeypatch, method, begun):
    before = sample()
    engine.submit([before])
    steps(engine, begun)
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, method, lambda *_: torch.zeros(()).view(3))
        engine.step()
    assert before.finish_reason == "abort"
    assert "engine failed" in before.error
    after = sample()
    finish(engine, after)
    assert after.finish_reason == "length"


def test_non_finite_logits_are_an_error(engine):
    engine.decoder.weights.current.final_norm.fill_(float("nan"))
    sequence = sample()
    finish(engine, sequence)
    assert sequence.finish_reason == "abort"
    assert "version 0" in sequence.error


def test_nan_in_the_cache_does_not_affect_later_sequences(qwen3):
    engine, fresh = (make_engine(qwen3.directory, slots=2) for _ in range(2))
    layer = engine.decoder.weights.current.layers[0]
    good = layer.input_norm.clone()
    layer.input_norm.fill_(float("nan"))
    failed = [sample(), sample(range(100, 140))]
    finish(engine, *failed)
    assert [s.finish_reason for s in failed] == ["abort", "abort"]
    layer.input_norm.copy_(good)
    later, expected = ([sample((5, 6)), sample((7, 8, 9))] for _ in range(2))
    finish(engine, *later)
    finish(fresh, *expected)
    assert [s.token_ids for s in later] == [s.token_ids for s in expected]
    assert all(s.finish_reason == "length" for s in later)


def test_gpu_error_in_a_step_ends_the_engine(engine, monkeypatch, refusal):
    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine.submit([sample()])
    monkeypatch.setattr(engine.decoder, "decode", lost)
    with refusal(torch.AcceleratorError):
        engine.run()


def test_gpu_error_in_an_update_ends_the_engine(engine, qwen3, monkeypatch, refusal):
    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.decoder.weights, "load", lost)
    update = engine.install_weights(Checkpoint(qwen3.directory), 1)
    with refusal(torch.AcceleratorError):
        engine.run()
    assert isinstance(update.exception(timeout=0), torch.AcceleratorError)


def test_more_sequences_than_a_sequence_has_tokens(qwen3):
    engine = make_engine(qwen3.directory, slots=12, max_len=8)
    sequences = [sample((20 + i, 30 + i), seed=i) for i in range(12)]
    finish(engine, *sequences)
    for sequence in sequences:
        assert sequence.error is None
        expected = qwen3.logprobs(sequence.prompt_ids, sequence.token_ids)
        assert sequence.logprobs == near(expected.tolist())


def test_streamed_sequences_report_every_token(engine):
    seen = []
    sequence = sample()
    sequence.streamed = True
    sequence.on_update = lambda: seen.append(len(sequence.token_ids))
    finish(engine, sequence, sample(seed=1))
    assert seen == list(range(1, 21))
    assert len(sequence.logprobs) == 20


def test_an_idle_engine_wakes_for_commands_and_requests(engine):
    sequence = sample(max_tokens=3)
    finished = threading.Event()
    sequence.on_update = finished.set
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        engine.pause("keep").result()
        engine.resume().result()
        engine.submit([sequence])
        assert finished.wait(10)
        unfinished = sample(max_tokens=100_000)
        engine.pause("keep").result()
        engine.submit([unfinished])
    finally:
        engine.stop()
        thread.join()
    assert not thread.is_alive()
    assert unfinished.finish_reason == "abort"
