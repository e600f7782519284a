"""Exact match: the response is the ground truth, apart from white space around it."""

from lockstep.errors import DataError


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when both are equal after stripping white space at the ends, else 0.0. Raises DataError when there is no
    ground truth.
    """
    if not isinstance(ground_truth, str):
        raise DataError(f"exact match needs a string in reward_model.ground_truth, not {ground_truth!r}")
    return float(solution_str.strip() == ground_truth.strip())
