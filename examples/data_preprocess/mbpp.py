"""MBPP as parquet files: python examples/data_preprocess/mbpp.py --source PATH_OR_HUB_ID --out FOLDER."""

import sys

from lockstep.data.preprocess.main import recipe_main
from lockstep.tools.evaluate.programs import MBPP

if __name__ == "__main__":
    sys.exit(recipe_main(MBPP, sys.argv[1:]))
