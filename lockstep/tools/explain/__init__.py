"""`lockstep explain`: a configuration in words, before it runs. See docs/explain.md.

```text
command   the command line              values   each value and where it comes from
ppo       what a step does, and where the models are
```
"""
