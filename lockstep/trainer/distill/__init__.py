"""Distillation."""
