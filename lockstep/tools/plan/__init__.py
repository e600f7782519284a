"""`lockstep plan`: memory, time and cost of a configuration before it runs, without a GPU. See docs/plan.md.

```text
command   the command line            propose   what would be faster, or fit
table     what is printed             measured  a finished run beside what was predicted for it
```
"""
