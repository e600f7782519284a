"""From files of prompts to the rows of a training step."""
