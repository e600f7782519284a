"""Checkpoints on disk: named, whole or not there at all, checked, kept or deleted, found again; and one run per folder."""
