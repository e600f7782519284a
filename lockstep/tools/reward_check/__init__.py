"""`lockstep rewards check`: try a reward before it is trained on, with right answers, nonsense, attacks and the model's own samples.

```text
responses.py  the responses to try, and the score that each may get
trials.py     which rows are tried with which responses, and what the reward manager said of each, asked twice
report.py     what is wrong, with examples and tables
```
"""
