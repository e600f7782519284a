"""Run: everything around the steps of a recipe: start, resume, stop, place models, save, summarise."""
