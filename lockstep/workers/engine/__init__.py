"""Training engines: `base.py` is the interface, `registry.py` the table, each backend a folder."""
