"""Policy as a transformers model: forward pass, attention, adapters, and checks of models."""
