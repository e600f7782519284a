"""`lockstep preprocess gsm8k` as a script: python examples/data_preprocess/gsm8k.py --source PATH_OR_HUB_ID --out FOLDER."""

import sys

from lockstep.data.preprocess.main import main

if __name__ == "__main__":
    sys.exit(main(["gsm8k", *sys.argv[1:]]))
