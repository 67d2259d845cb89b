"""Constrained replies: JSON schemas, regular expressions, grammars and choices, with llguidance (extra `grammar`).

constraint.py    writes a constraint as a grammar of llguidance
json_schema.py   checks the keywords of a JSON schema, with the place of those that cannot be enforced
compiler.py      compiles constraints on a thread of its own, and keeps the latest ones
matcher.py       follows one stream of tokens through a compiled grammar

Nothing in here imports llguidance before a request is constrained.
"""
