"""Sleep of the engine: memory is released and restored, and sampling continues as if it had not slept."""

import psutil
import pytest
import torch

from buckeye.errors import UsageError
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.weights import Checkpoint
from tests.devices import DEVICES, PRETEND

from .conftest import PROMPT, finish, make_engine, near, sample


def done(engine, future):
    engine.step()
    return future.result(timeout=0)


def sleep(engine, weights="keep", mode="abort"):
    done(engine, engine.pause(mode))
    done(engine, engine.release(weights=weights))


def wake_up(engine, *tags):
    return done(engine, engine.wake_up(tags or ("weights", "kv_cache")))


@pytest.mark.parametrize("weights", ["keep", "move"])
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_engine_samples_the_same_tokens_after_its_sleep(make_model, device, weights):
    directory = make_model("qwen3").directory
    engine, undisturbed = (make_engine(directory, spare=2, device=device) for _ in range(2))
    finish(engine, sample(seed=1))
    sleep(engine, weights)
    assert not engine.decoder.cache.is_allocated
    assert engine.decoder.weights.is_loaded == (weights == "keep" or device == "cpu")
    assert wake_up(engine)
    pair = sample(seed=2), sample(seed=2)
    finish(engine, pair[0])
    finish(undisturbed, pair[1])
    assert (pair[0].token_ids, pair[0].logprobs) == (pair[1].token_ids, pair[1].logprobs)


def test_requests_wait_while_the_engine_sleeps(qwen3):
    engine = make_engine(qwen3.directory)
    running, late, expected = sample(seed=1), sample(seed=2), sample(seed=2)
    engine.submit([running])
    engine.step()
    sleep(engine)
    assert running.finish_reason == "abort"
    engine.submit([late])
    assert not engine.step()
    assert late.finish_reason is None
    with pytest.raises(UsageError):
        done(engine, engine.resume())
    with pytest.raises(UsageError):
        done(engine, engine.prompt_logprobs(PROMPT))
    assert wake_up(engine)
    finish(engine)
    finish(make_engine(qwen3.directory), expected)
    assert late.token_ids == expected.token_ids


def test_paused_sequences_continue_after_a_sleep(qwen3):
    engine, sequence, expected = make_engine(qwen3.directory), sample(seed=1), sample(seed=1)
    engine.submit([sequence])
    for _ in range(8):
        engine.step()
    sleep(engine, mode="keep")
    wake_up(engine)
    finish(engine)
    finish(make_engine(qwen3.directory), expected)
    assert sequence.token_ids == expected.token_ids
    assert sequence.logprobs == near(expected.logprobs)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_sequences_can_end_or_wait_while_the_engine_sleeps(qwen3, mode):
    engine = make_engine(qwen3.directory)
    ended, first, second = (sample(seed=seed) for seed in (1, 2, 3))
    engine.submit([ended, first, second])
    for _ in range(8):
        engine.step()
    sleep(engine, mode="keep")
    engine.abort([ended])
    done(engine, engine.pause(mode))
    wake_up(engine)
    finish(engine)
    assert ended.finish_reason == "abort"
    assert {first.finish_reason, second.finish_reason} == {"abort" if mode == "abort" else "length"}
    for sequence in (first, second):
        expected = qwen3.logprobs(PROMPT, sequence.token_ids).tolist()
        assert sequence.logprobs == near(expected)


def test_new_weights_during_a_sleep_do_not_keep_a_freed_cache(make_model):
    engine, new, sequence = make_engine(make_model("qwen3").directory), make_model("qwen3", seed=1), sample()
    engine.submit([sequence])
    for _ in range(8):
        engine.step()
    sleep(engine, mode="keep")
    done(engine, engine.install_weights(Checkpoint(new.directory), 3, keep_kv_cache=True))
    wake_up(engine)
    finish(engine)
    expected = new.logprobs(PROMPT, sequence.token_ids)[8:]
    assert torch.tensor(sequence.logprobs[8:]) == near(expected)


def test_dropped_weights_are_replaced_before_the_engine_wakes_up(make_model):
    new = make_model("qwen3", seed=1)
    engine = make_engine(make_model("qwen3").directory, device=PRETEND)
    sleep(engine, "drop")
    assert not engine.decoder.weights.is_loaded
    with pytest.raises(UsageError):
        wake_up(engine)
    assert not wake_up(engine, "weights")
    done(engine, engine.install_weights(Checkpoint(new.directory), 3))
    assert not engine.decoder.cache.is_allocated
    assert wake_up(engine, "kv_cache")
    sequence = sample(seed=1)
    finish(engine, sequence)
    assert sequence.version_spans() == [(3, 0, 20)]
    assert torch.tensor(sequence.logprobs) == near(new.logprobs(PROMPT, sequence.token_ids))


def test_sleep_and_wake_up_can_be_repeated(qwen3):
    engine = make_engine(qwen3.directory)
    assert wake_up(engine)
    for _ in range(2):
        sleep(engine)
    for _ in range(2):
        assert wake_up(engine)
    finish(engine, sequence := sample(seed=1))
    assert sequence.finish_reason == "length"


def test_only_a_paused_engine_releases_memory(qwen3):
    with pytest.raises(UsageError):
        done(engine := make_engine(qwen3.directory), engine.release())


def test_released_cache_is_returned_to_the_system(make_model):
    engine = make_engine(make_model("qwen3").directory)
    old = engine.decoder.cache
    cache = KVCache(
        engine.decoder.spec, slots=4096, max_len=old.max_len, dtype=old.kv.dtype, device=old.kv.device
    )
    cache.kv.fill_(1.0)
    size, process = cache.kv.nbytes, psutil.Process()
    filled = process.memory_info().rss
    cache.release()
    assert size > 100_000_000
    assert filled - process.memory_info().rss > 0.9 * size
    cache.allocate()
    assert not cache.kv.count_nonzero()
