"""What verl's users bring: their keys (`keys`, `command`), their algorithms' names (`core_algos`), their import paths (`names`).

Nothing here runs in a step. docs/from_verl.md is the page for readers; docs/algorithms/verl.md lists where numbers differ.
"""
