"""Rollout engines: the interface (`base.py`, `request.py`, `stream.py`), the table (`registry.py`), and `hf.py` (transformers)."""
