"""How often a policy's layers compute."""

from buckeye.trainer.model.policy import Policy


def count_passes(policy: Policy) -> list[int]:
    """How often each layer of a policy computes from now on; recomputed activations count."""
    counts = [0] * len(policy.model.base_model.layers)

    def count(number: int) -> None:
        counts[number] += 1

    for number, layer in enumerate(policy.model.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: count(number))
    return counts
