"""The reward of a small sum."""

import re


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1 if the last number of the response is the sum, else 0."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
