"""Configuration: typed dataclasses, one file a section. A default is written here and nowhere else; nothing here imports torch.

`load.py` turns a command line (overrides.py) into a `PPOConfig`; `presets.py` holds the embedded task's values; `arithmetic.py`
says the batch sizes in plain words; `reference.py` writes the list of keys.
"""

from lockstep.config.load import as_config, load_config
from lockstep.config.ppo import PPOConfig

__all__ = ["PPOConfig", "as_config", "load_config"]
