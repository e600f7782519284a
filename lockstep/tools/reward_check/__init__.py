"""Try a reward before it is trained on: right answers, nonsense, attacks and the model's own samples, each scored twice.

```text
rows.py     which rows of the data are tried
gold.py     the right answer of a row, as a response
fuzz.py     responses that a reward must survive, and those that must earn nothing
traps.py    programs that try to leave the sandbox, and what shows that one did
scoring.py  ask the reward manager, twice
report.py   what is wrong, with examples
tables.py   the same as tables
```
"""
