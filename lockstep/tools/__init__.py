"""Commands around training: each a folder."""
