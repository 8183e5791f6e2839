"""Policy as a transformers model: forward pass, attention, adapters, trainable models."""
