"""What users of other libraries bring. Nothing here runs in a step."""
