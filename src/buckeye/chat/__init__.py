"""Requests, messages and errors of OpenAI's HTTP API as types. This package does no input or output."""
