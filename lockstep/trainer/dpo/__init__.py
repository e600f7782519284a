"""Learning from preferences."""
