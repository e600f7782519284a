"""Rollout engines: the interface (`base.py`, `request.py`, `stream.py`), the table (`registry.py`), and transformers' generate (`hf.py`)."""
