"""One driver calls methods on groups of workers.

```text
driver:  group.update(batch) -> plan: a call per rank -> [host 0 | host 1 | ...] -> collect: one value
```

`base` holds everything that does not know where workers live, `local` runs one worker in this process, `ray` an actor
per process.
"""
