"""Configuration: typed dataclasses, one file a section. A default is written here and nowhere else; nothing here imports torch.

load.py       from a command line and a YAML file to a `PPOConfig` or another recipe's configuration
overrides.py  arguments of the form key=value
keys.py       which keys there are, and what an unknown one was meant to be
presets.py    values that go together: of the algorithms, of the embedded task, of a first run on a CPU
follow.py     sizes that follow the sizes that the user set
check.py      checks that the sections share
identity.py   what a resumed run must keep, the run's name, and what is secret
reference.py  the list of keys, and what `--help` prints
"""

from lockstep.config.load import as_config, load_config
from lockstep.config.ppo import PPOConfig

__all__ = ["PPOConfig", "as_config", "load_config"]
