"""Formation of Dakota words.

Each function returns every form that the record licenses, the preferred one first. The rule identifiers in
the docstrings are those of `data/rules.json`.
"""
