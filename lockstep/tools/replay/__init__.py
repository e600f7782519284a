"""`lockstep capsule` writes a step of a run to a repro file; `lockstep replay` repeats its steps and compares their metrics."""
