"""Reward functions that worker processes load: without torch, so that they load at once."""

import os
import re
import time


def truth(ground_truth):
    return ground_truth


def behave(ground_truth):
    """What a row says, a reward function does."""
    match ground_truth:
        case "raise":
            raise KeyError("my own mistake")
        case "exit":
            raise SystemExit(3)
        case "hang":
            time.sleep(3600)
        case "backtrack":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "die":
            os._exit(9)
        case "nan":
            return float("nan")
    return {"score": ground_truth, "pid": os.getpid()}


def fails_on_six(solution_str):
    """Raises where the response has a 6."""
    if "6" in solution_str:
        raise ZeroDivisionError
    return 2.0


def length(solution_str):
    """The number of words, and the words."""
    return {"score": len(solution_str.split()), "words": solution_str.split()}


def fails_for_short_words(solution_str, ground_truth):
    """Exact match that raises for words under five letters."""
    if len(ground_truth) < 5:
        raise ValueError("this word is too short for me")
    return float(solution_str == ground_truth)


def nap(seconds):
    """Takes that long."""
    time.sleep(seconds)
    return 1.0


def works_at_last(counter, at, how):
    """Counts its calls in the file `counter`; before call number `at` (from 0) it does what `how` says."""
    with open(counter, "a") as file:
        file.write(f"{time.monotonic()}\n")
    with open(counter) as file:
        number = len(file.readlines()) - 1
    if number < at:
        if how == "hang":
            time.sleep(3600)
        if how == "die":
            os._exit(9)
        if how == "none":
            return None
        raise ConnectionError("500")
    return float(number)
