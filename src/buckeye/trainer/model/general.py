"""General path of the trainer: transformers computes padded rows with one sample each.

It supports every decoder: position biases, caps of scores and logits, and any output layer.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from buckeye.errors import UsageError
from buckeye.inference.engine.general_spec import general_path_line
from buckeye.trainer.data.packing import PackedMicroBatch, pack_micro_batch
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.experts import ExpertLoads
from buckeye.trainer.model.trainable import packing_reasons

logger = logging.getLogger(__name__)

_CHECKED_LENGTHS = (11, 6, 3)
# of logits, relative; several times the rounding error of float32, and of bfloat16
_MAX_DIFFERENCE, _MAX_DIFFERENCE_16_BIT = 1e-3, 0.05


def padded_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return the logits after all tokens of a sample, [tokens, vocabulary]. `token_ids` is i64[tokens]."""
    logits: Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits


def padded_token_logprobs(
    model: PreTrainedModel, row: PackedMicroBatch, temperatures: Tensor, loads: ExpertLoads
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each of the N targets of a row, and the entropy of its distribution, [N] each.

    Each sample of the row is computed in a separate row, padded on the right. A shared prefix is computed
    once per sample. `temperatures` is f32[N]. `loads` counts no padding.
    """
    token_ids, positions = row.token_ids[row.row_indices], row.position_ids[row.row_indices]
    samples = (positions == 0).cumsum(0) - 1
    shape = (int(samples[-1]) + 1, int(positions.max()) + 1)
    padded = token_ids.new_zeros(shape).index_put((samples, positions), token_ids)
    mask = torch.zeros_like(padded).index_put((samples, positions), torch.ones_like(token_ids))
    # a token of a shared prefix belongs to several samples; use any of them
    places = torch.empty(len(row.token_ids), dtype=torch.int64, device=token_ids.device)
    places[row.row_indices] = torch.arange(len(token_ids), device=token_ids.device)
    sources = places[row.sources]
    loads.real = mask.flatten().bool()
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    logits = logits[samples[sources], positions[sources]].float() / temperatures[:, None]
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, row.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def can_pack(model: PreTrainedModel, name: str) -> bool:
    """Return True if the model computes equal logits in a packed row, and select the attention for it.

    Otherwise log that the general path is used. Raise `UsageError` if a later token changes the logits of
    earlier ones, because such a model cannot be trained to predict the next token.
    """
    model.eval()
    vocab = model.config.get_text_config(decoder=True).vocab_size
    samples = [(np.arange(length, dtype=np.int32) * 5 + length) % vocab for length in _CHECKED_LENGTHS]
    ids = [torch.from_numpy(sample).long().to(model.device) for sample in samples]
    with torch.no_grad():
        alone = [padded_logits(model, sample).float() for sample in ids]
        first = padded_logits(model, ids[0][: _CHECKED_LENGTHS[1]]).float()
    limit = _MAX_DIFFERENCE if model.dtype == torch.float32 else _MAX_DIFFERENCE_16_BIT
    if not _difference(first, alone[0][: len(first)]) < limit:
        raise UsageError(
            f"the model {name!r} cannot be trained: its attention is not causal",
            code="BK-MODEL-UNSUPPORTED",
            hint="choose another model",
        )
    packed = _packed_logits(model, samples) if _may_pack(model) else None
    if packed is not None and _difference(packed, torch.cat(alone)) < _MAX_DIFFERENCE:
        model.set_attn_implementation(PACKED_ATTENTION)
        return True
    logger.warning("%s", general_path_line(model.config.model_type))
    return False


def _may_pack(model: PreTrainedModel) -> bool:
    """Return True unless packed rows may differ in a way that short samples or 16-bit weights do not show."""
    config, head = model.config.to_dict(), model.get_output_embeddings()
    window = config.get("sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    is_plain = not window and not [*packing_reasons(config)]
    return is_plain and model.dtype == torch.float32 and getattr(head, "bias", head) is None


@torch.no_grad()
def _packed_logits(model: PreTrainedModel, samples: list[Any]) -> Tensor | None:
    """Return the logits of samples in a packed row, or None if the model does not support this attention."""
    attention = model.config._attn_implementation
    masks = [np.zeros(len(ids), np.bool_) for ids in samples]
    row = pack_micro_batch(samples, masks, model.device)
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        if model.config._attn_implementation != PACKED_ATTENTION:
            return None
        hidden = model.base_model(
            inputs_embeds=model.get_input_embeddings()(row.token_ids)[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            layout=row.layout,
            flash=False,
        ).last_hidden_state[0]
        logits: Tensor = (hidden @ model.get_output_embeddings().weight.to(hidden.dtype).T).float()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # models without this interface raise arbitrary exceptions
        logger.debug("Packed rows are not possible: %r", error)
        return None
    finally:
        model.set_attn_implementation(attention)
    return logits[row.row_indices]


def _difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def disable_dropout(model: nn.Module) -> None:
    """Disable dropout and router noise, because the sampler has none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if any("jitter" in name for name in vars(module)):
            module.training = (
                False  # PhiMoE also selects experts by the size of the noise, so it is not set to 0
            )
