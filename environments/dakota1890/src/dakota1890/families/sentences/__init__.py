"""Sentences of recorded words: their English, their parts, and every order that the rules license."""
