"""Count the forward passes of a policy's layers."""

from buckeye.trainer.model.policy import PolicyNetwork


def count_passes(policy: PolicyNetwork) -> list[int]:
    """Return live counts of each layer's forward passes from now on; recomputed activations count."""
    counts = [0] * len(policy.model.base_model.layers)

    def count(number: int) -> None:
        counts[number] += 1

    for number, layer in enumerate(policy.model.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: count(number))
    return counts
