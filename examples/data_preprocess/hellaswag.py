"""`lockstep preprocess hellaswag` as a script: python examples/data_preprocess/hellaswag.py --source PATH_OR_HUB_ID --out FOLDER."""

import sys

from lockstep.data.preprocess.main import main

if __name__ == "__main__":
    sys.exit(main(["hellaswag", *sys.argv[1:]]))
