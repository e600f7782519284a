"""`lockstep preprocess math` as a script: python examples/data_preprocess/math_dataset.py --source PATH_OR_HUB_ID --out FOLDER."""

import sys

from lockstep.data.preprocess.main import main

if __name__ == "__main__":
    sys.exit(main(["math", *sys.argv[1:]]))
