"""`lockstep preprocess`: public datasets as the parquet files that training reads.

```text
main.py       the command line; rows through a recipe into a parquet file, with an account of those that cannot be used
sources.py    where the files of a dataset are (a folder, files, the hub), which split each belongs to, and their rows in any format
recipe.py     what a dataset's own module says, and the error of a row
gsm8k.py, math_dataset.py, hellaswag.py    one dataset each: a row in, a row out
full_hh_rlhf.py, chat.py    preferences and conversations, in their usual forms
```
"""
