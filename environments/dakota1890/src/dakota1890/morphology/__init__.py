"""How Dakota words are formed.

Each function returns every form the record licenses, the preferred one first. The rule identifiers in the
docstrings are those of `data/rules.json`.
"""
