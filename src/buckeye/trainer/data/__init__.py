"""Samples and chats as packed micro-batches. Does not import models."""
