"""`lockstep eval`: a model, a checkpoint or a server on data files or named tasks. See docs/eval.md."""
