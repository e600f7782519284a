"""`lockstep doctor`: is what a run needs here, and does it work? See docs/explain.md.

```text
command   the command line, and what is printed    parts   versions, optional parts, the machine
selftest  generation and training, in a process of its own, which can be given up
```
"""
