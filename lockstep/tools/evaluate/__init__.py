"""`lockstep eval`: ask a model, judge its answers, say how sure the numbers are.

```text
questions   what is asked and what was answered; rows of files as questions; questions that the training data has
tasks       the named tasks; `grading` judges their answers, `programs` has the recipes of HumanEval and MBPP
answerers   a model that is loaded here, or a server
scoring     answers judged as validation in training judges them
results     numbers with intervals, the result file, the comparison with an earlier one
```
"""
