"""The policy as a model of transformers: forward pass, attention, adapters, what can be trained."""
