"""`lockstep preprocess full_hh_rlhf` as a script: python examples/data_preprocess/full_hh_rlhf.py --source PATH_OR_HUB_ID --out FOLDER."""

import sys

from lockstep.data.preprocess.main import main

if __name__ == "__main__":
    sys.exit(main(["full_hh_rlhf", *sys.argv[1:]]))
