"""The policy: any Hugging Face causal language model, run on packed rows of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from buckeye.errors import UsageError
from buckeye.trainer.attention import PACKED_ATTENTION, make_layout

_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and how it is run: `flash` selects CUDA's variable-length attention; `compute_dtype` is what
    the layers compute in while the parameters stay float32."""

    model: PreTrainedModel
    device: torch.device
    compute_dtype: torch.dtype
    flash: bool

    def hidden_states(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Final hidden states [tokens, hidden] of a row of samples; `token_ids` i64[tokens] on the device."""
        layout = make_layout(lengths, self.device, flash=self.flash)
        mixed = self.compute_dtype != torch.float32
        with torch.autocast(self.device.type, self.compute_dtype, enabled=mixed):
            output = self.model.base_model(
                input_ids=token_ids[None], position_ids=layout.position_ids, use_cache=False, layout=layout
            )
        return output.last_hidden_state[0].to(self.compute_dtype)

    def checkpoint_activations(self, *, every: int) -> None:
        """Recompute the activations of every so many layers in the backward pass instead of keeping them."""
        self.model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)

    @property
    def head_weight(self) -> Tensor:
        """The output projection [vocabulary, hidden], float32."""
        return self.model.get_output_embeddings().weight

    @property
    def embedding_names(self) -> set[str]:
        """The names of the input embedding and the output projection among `trainable`."""
        outer = (self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight)
        return {name for name, p in self.trainable.items() if any(p is weight for weight in outer)}

    @property
    def matrix_elements(self) -> int:
        """How many matrix elements a token is multiplied with; looking up an embedding multiplies none."""
        looked_up = self.model.get_input_embeddings().weight
        tied = looked_up is self.head_weight
        elements = sum(p.numel() for p in self.model.parameters() if p.dim() >= 2)
        return elements if tied else elements - looked_up.numel()

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, each shared one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def pick_device(choice: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device; a rank's own GPU. `UsageError` if there is no GPU to take."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"Device {choice!r} was asked for, but this process sees {torch.cuda.device_count()} GPUs and "
            f"needs number {local_rank}. Set trainer.model.device to 'cpu', or give it GPUs."
        )
    return torch.device("cuda", local_rank)


def load_policy(name: str, device: torch.device, *, flash: bool = False) -> Policy:
    """Load a model directory or hub name in float32. On CUDA it computes in bfloat16.

    Raises `UsageError` if there is no such model, or if it changes its logits after the output projection.
    """
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"The model {name!r} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise UsageError(
            f"The model {name!r} is incomplete: {sorted(info['missing_keys'])[:3]} ... not stored."
        )
    head = model.get_output_embeddings()
    scaled = [key for key in _SCALED_LOGITS if getattr(model.config, key, None) not in (None, 1.0)]
    if scaled or head is None or head.bias is not None:
        raise UsageError(f"The model {name!r} is not supported: its output layer has {scaled or 'a bias'}.")
    on_gpu = device.type == "cuda"
    return Policy(
        model=model.to(device).train(),
        device=device,
        compute_dtype=torch.bfloat16 if on_gpu else torch.float32,
        flash=flash and on_gpu,
    )
