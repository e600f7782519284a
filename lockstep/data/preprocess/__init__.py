"""`lockstep preprocess`: public datasets as the parquet files that training reads.

```text
sources.py    where the files of a dataset are (a folder, files, the hub) and which split each belongs to
reading.py    a file's rows, whatever its format
recipe.py     what a dataset's own module says, and the errors a row can have
writing.py    rows through a recipe into a parquet file, with an account of those that cannot be used
gsm8k.py, math_dataset.py, hellaswag.py, humaneval.py, mbpp.py    one dataset each: a row in, a row out
full_hh_rlhf.py, chat.py    preferences and conversations, in the forms that are common
main.py       the command line
```
"""
