"""Generation engines: `base.py` is the interface, `registry.py` the table, each engine a folder."""
