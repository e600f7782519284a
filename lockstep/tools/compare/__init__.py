"""`lockstep compare BATCH`: one recorded batch, several algorithms, and what each would do with it (docs/compare.md).

```text
algorithms  what the command line calls an algorithm -> keys of the configuration
measure     advantages, loss and gradient of each, by the path of a training step; the numbers and texts that come of them
report      the record of a comparison, its tables and its picture
```
"""
