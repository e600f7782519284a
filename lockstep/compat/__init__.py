"""What exists for the names of others."""
