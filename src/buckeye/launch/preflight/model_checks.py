"""Check that Buckeye can use a model, its tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path

from buckeye.base.keys import key
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, InferenceError, UsageError, first_line
from buckeye.inference.engine.architecture import is_untrained, read_model_config
from buckeye.inference.engine.general_spec import GeneralSpec, general_path_line
from buckeye.inference.render.template import PROBE_QUESTION, PROBE_SYSTEM
from buckeye.inference.render.template_files import TEMPLATE_FILE, read_template
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, skipped, warning
from buckeye.launch.preflight.model import (
    download_hint,
    find_model,
    look_up_on_hub,
    nearest_model,
    refuse_path,
)
from buckeye.launch.preflight.model_files import check_model_files, check_readable, check_tokenizer_files
from buckeye.monitor.finding import advice_of
from buckeye.trainer.model.trainable import unpacked_reasons, untrainable_reasons

MODEL, TOKENIZER = "model", "tokenizer"


def check_model(config: RLConfig, *, vllm: bool) -> Check:
    """Check that the files of the model are complete, and that the engine supports its architecture."""
    name, path = config.trainer.model.name, find_model(config.trainer.model.name)
    if path is None:
        try:
            refuse_path(name, at=None)
        except UsageError as error:
            return failed_with(MODEL, error)
        near = nearest_model(name)
        hint = f"; did you mean {near}?" if near else ""
        return skipped(MODEL, f"{name} is downloaded from the Hugging Face hub when the run starts{hint}")
    check = _check_architecture(config, path, vllm=vllm)
    ckpt = config.trainer.ckpt
    is_new = ckpt is None or ckpt.resume_step is None
    if check.state != "failed" and not check.do and is_new and is_untrained(path):
        return warning(MODEL, f"{check.seen}: these weights are untrained", advice_of("untrained"))
    return check


def _check_architecture(config: RLConfig, path: Path, *, vllm: bool) -> Check:
    embedded = config.inference is not None and not vllm
    try:
        check_readable(path)
        model_config = read_model_config(path / "config.json")
        named = isinstance(model_config.get("model_type"), str)
        reasons = untrainable_reasons(model_config) if named and embedded else []
        if reasons:  # with another server, this is a problem of settings
            at = f"{path}/config.json"
            return failed(
                MODEL, f"{at}: {'; '.join(reasons)}", "use another model", code="BK-MODEL-UNSUPPORTED"
            )
        spec = check_model_files(path, "engine" if embedded else "trainer")
    except (InferenceError, UsageError) as error:
        return failed_with(MODEL, error, "use another model")
    seen = f"{(model_config.get('architectures') or [model_config['model_type']])[0]}, {path}"
    is_general = bool(unpacked_reasons(model_config)) or (embedded and isinstance(spec, GeneralSpec))
    general = warning(MODEL, f"{seen}; {general_path_line(str(model_config['model_type']))}", "")
    if not embedded or spec is None:
        return general if is_general else ok(MODEL, seen)
    seq_len = config.orchestrator.seq_len
    if seq_len > spec.max_positions:
        # the engine refuses every request for as many tokens as it has positions
        report = failed if config.orchestrator.max_reply_tokens >= spec.max_positions else warning
        return report(
            MODEL,
            f"{seen}: the model has {spec.max_positions} positions, but seq_len is {seq_len}",
            f"add `--seq-len {spec.max_positions}`",
        )
    return general if is_general else ok(MODEL, seen)


def fetch_small_files(name: str) -> Check:
    """Check that a model is on the Hugging Face hub: download its `config.json`."""
    from huggingface_hub import hf_hub_download

    try:
        look_up_on_hub(name)
        hf_hub_download(name, "config.json", token=key("HF_TOKEN") or None)
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        return failed(
            MODEL,
            f"cannot download {name}: {first_line(error)}",
            download_hint(name),
            code="BK-MODEL-NOT-FOUND",
        )
    return ok(MODEL, f"{name} is on the Hugging Face hub; it is downloaded when the run starts")


def check_tokenizer(config: RLConfig) -> Check:
    """Check that the model has a tokenizer and a chat template."""
    path = find_model(config.trainer.model.name)
    if path is None:
        return skipped(TOKENIZER, "the model is not on this machine")
    try:
        problem = check_tokenizer_files(path)
        check = check_template(path)
    except ModuleNotFoundError as error:  # the base install, which reports the missing extra elsewhere
        return skipped(TOKENIZER, f"{error.name} is not installed")
    except BuckeyeError as error:
        return failed_with(TOKENIZER, error)
    if check.state != "ok" or problem is None:
        return check
    return warning(TOKENIZER, problem, "copy the tokenizer that belongs to the model")


def check_model_and_tokenizer(path: Path) -> None:
    """Raise `BuckeyeError` if a model, its tokenizer or its chat template cannot be used for training."""
    check_model_files(path, "trainer")
    check_tokenizer_files(path)
    check = check_template(path)
    if check.state == "failed":
        raise UsageError(check.seen, code=check.code, at=str(path), hint=check.do)


def check_template(path: Path) -> Check:
    """Check that the chat template in a model's folder renders prompts."""
    try:
        template = read_template(path)
    except InferenceError as error:
        return failed_with(TOKENIZER, error, "download or copy the model again")
    if template is None:
        return failed(
            TOKENIZER,
            f"{path} has no chat template, which the prompts of environments need",
            f"use an instruction-tuned model, or add a {TEMPLATE_FILE} to its directory",
            code="BK-TEMPLATE",
        )
    problem = template.find_problem([PROBE_QUESTION])
    system_problem = template.find_problem([PROBE_SYSTEM, PROBE_QUESTION])
    if problem is not None and system_problem is not None:
        do = f"correct {TEMPLATE_FILE}, or use another model"
        return failed(TOKENIZER, problem, do, code="BK-TEMPLATE")
    messages = [PROBE_QUESTION] if problem is None else [PROBE_SYSTEM, PROBE_QUESTION]
    if PROBE_QUESTION["content"] not in template.text(messages, (), prompt=True):
        seen = f"the chat template of {path} omits user messages"
        return failed(TOKENIZER, seen, f"correct {TEMPLATE_FILE}", code="BK-TEMPLATE")
    if template.missing_header:
        return warning(
            TOKENIZER,
            f"the chat template ignores add_generation_prompt; Buckeye adds the header "
            f"{template.missing_header!r} to prompts",
            f"other servers do not add it: write it in {TEMPLATE_FILE}, under `if add_generation_prompt`",
        )
    if system_problem is not None:
        return ok(TOKENIZER, f"found a chat template, which cannot render system messages: {system_problem}")
    return ok(TOKENIZER, "found a chat template")
