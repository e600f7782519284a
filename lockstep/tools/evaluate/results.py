"""What samples come to: numbers with intervals, by source; the same as JSON and as a table; and beside an earlier result file.

Two results can be compared if the same judge judged each question. Another judge, or other settings of it, is an error: the difference
would be of the judges. Other differences (the code of the same function, the template, the sampling) may be what is compared, or change
nothing: they are only named.
"""

import functools
import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lockstep.config.identity import redacted
from lockstep.data.preprocess.main import Account
from lockstep.errors import ConfigError, DataError
from lockstep.observability.score_summary import score_summary
from lockstep.observability.statistics import Estimate, compare, estimate
from lockstep.rewards.judges import MODEL
from lockstep.rewards.manager import RewardManager
from lockstep.tools.evaluate.questions import Question, Sample, digest
from lockstep.tools.evaluate.scoring import FORMATTED
from lockstep.utils.terminal import printable

Numbers = dict[str, dict[str, Any]]
"""Name -> value, low, high."""
Judge = dict[str, dict[str, Any]]
"""Name of a judge -> weight, function (file.py:name), settings, and a hash of the code of its file."""


def summarise(questions: Sequence[Question], samples: Sequence[Sample], shown: Sequence[str] | None) -> dict[str, Any]:
    """Return source -> its numbers.

    ```text
    scores                                    variable -> name -> number with its interval
    cut_by_length                             the share of answers that reached the limit
    format_failures                           the share of answers without the requested form, if the judge tells
    num_questions, num_samples, num_missing   counts
    ```

    `shown` are the scores to sum up; None: `acc` if the reward gives it, else `reward`. Raises DataError if no sample has a score.
    """
    failures = [sample.failure for sample in samples if sample.failure is not None]
    if len(failures) == len(samples):
        raise DataError(f"no answer has a score; the first: {failures[0]}")
    found = {}
    for source in dict.fromkeys(question.source for question in questions):
        own = [sample for sample in samples if questions[sample.question].source == source]
        judged = [sample for sample in own if sample.failure is None]
        groups = _by_question(judged)
        variables = shown or (["acc"] if judged and all("acc" in sample.scores for sample in judged) else ["reward"])
        found[source] = {
            "num_questions": len({sample.question for sample in own}),
            "num_samples": len(own),
            "num_missing": len(own) - len(judged),
            "scores": {name: _numbers(groups, name) for name in variables} if judged else {},
        }
        if judged and not questions[judged[0].question].choices:
            found[source]["cut_by_length"] = _share(groups, lambda sample: sample.finish_reason == "length")
        if judged and all(FORMATTED in sample.scores for sample in judged):
            found[source]["format_failures"] = _share(groups, lambda sample: not sample.scores[FORMATTED])
    return found


def compare_with(
    questions: Sequence[Question], samples: Sequence[Sample], results: dict[str, Any], earlier: dict[str, Any]
) -> dict[str, Any]:
    """Return by source and score: the difference to an earlier result on the questions that both have, with interval and p-value."""
    old: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for place, entry in placed((entry["source"], entry["hash"]) for entry in earlier["questions"]):
        old[place] = earlier["questions"][entry]["scores"]
    groups = _by_question([sample for sample in samples if sample.failure is None])
    found: dict[str, Any] = {}
    for source, part in results.items():
        for variable in part["scores"]:
            new_scores = []
            old_scores = []
            for place, i in placed((question.source, question.hash) for question in questions):
                if place[0] == source and groups.get(i) and old.get(place, {}).get(variable):
                    new_scores.append([sample.scores[variable] for sample in groups[i]])
                    old_scores.append(old[place][variable])
            if len(new_scores) >= 2:
                difference = compare(new_scores, old_scores)
                found.setdefault(source, {})[variable] = _number(difference.estimate) | {
                    "p_value": difference.p_value,
                    "num_questions": difference.num_questions,
                    "num_better": difference.num_better,
                    "num_worse": difference.num_worse,
                }
    if not found:
        raise DataError(
            "--against: the earlier result has no question with a score that this one has; it was of other data, or of another judge"
        )
    return found


def question_entries(questions: Sequence[Question], samples: Sequence[Sample], judges: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the scores of each question, and the hash of its judge, for later comparisons."""
    groups = _by_question([sample for sample in samples if sample.failure is None])
    entries = []
    for i, question in enumerate(questions):
        own = groups.get(i, [])
        names = own[0].scores if own else {}
        scores = {name: [sample.scores[name] for sample in own] for name in names if all(name in sample.scores for sample in own)}
        judge = {"judge": digest(judges[i])} if judges else {}
        entries.append({"hash": question.hash, "source": question.source, "scores": scores} | judge)
    return entries


def source_rows(account: Account) -> dict[str, Any]:
    """Return how many rows of a task's files were read and used, and for each reason how many cannot be used, with the first of them."""
    unusable = [{"reason": reason, "count": count, "first": first} for reason, (count, first) in account.unusable.items()]
    return {"num_read": account.num_read, "num_used": account.num_written, "unusable": unusable}


def read_results(path: Path) -> dict[str, Any]:
    """Return an earlier result file. Raises DataError if it cannot be read as one."""
    try:
        earlier = json.loads((path / "results.json" if path.is_dir() else path).read_text())
        for entry in earlier["questions"]:
            entry["hash"], entry["source"], entry["scores"].items()
        return earlier
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"--against {path} is not a result file of lockstep eval: {error!r}") from error


def write_samples(path: Path, questions: Sequence[Question], samples: Sequence[Sample]) -> None:
    """Write every sample, one JSON object per line."""
    with path.open("w") as file:
        for sample in samples:
            question = questions[sample.question]
            row = {
                "question": question.hash,
                "index": sample.question,
                "sample": sample.number,
                "source": question.source,
                "prompt": question.prompt,
                "response": sample.text,
                "ground_truth": (question.columns.get("reward_model") or {}).get("ground_truth"),
                "finish_reason": sample.finish_reason,
                "num_tokens": sample.num_tokens,
                "failure": sample.failure,
                "scores": sample.scores,
                "preds": sample.preds,
                **({"extra": sample.extra} if sample.extra else {}),
            }
            file.write(json.dumps(row, default=str) + "\n")


def print_table(results: dict[str, Any], console: Console) -> None:
    """Print the numbers of a result file as a table."""
    say = functools.partial(console.print, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("source", "score", "", "value", "95 % interval", "questions"):
        table.add_column(name, justify="left" if name in ("source", "score", "") else "right")
    for source, part in results["results"].items():
        rows = [(variable, name, number) for variable, numbers in part["scores"].items() for name, number in numbers.items()]
        rows += [(name, "share", part[name]) for name in ("cut_by_length", "format_failures") if part.get(name)]
        for variable, name, number in rows:
            table.add_row(
                printable(source), variable, name, f"{number['value']:.3f}", _interval(number), str(part["num_questions"])
            )
    console.print(table)
    for source, part in results["results"].items():
        if part["num_missing"]:
            say(f"{printable(source)}: {part['num_missing']} of {part['num_samples']} samples have no score and are in no number")
    rows = results.get("source_rows", {})
    if unusable := rows.get("unusable"):
        say(f"{rows['num_read'] - rows['num_used']} of {rows['num_read']} rows cannot be used and are in no number")
    for kind in unusable or ():
        say(f"  {kind['count']}: {printable(kind['reason'])}; the first: {printable(kind['first'])}")
    if found := results.get("contamination"):
        say(
            f"contaminated: {found['num_contaminated']} of {found['num_questions']} questions have {found['num_words']} words in a row in "
            f"the training files ({found['num_too_short']} are too short to tell)"
        )
        for source, scores in found["without"].items():
            for variable, number in scores.items():
                say(f"  {printable(source)} {variable} without them: {number['value']:.3f} {_interval(number)}")
    for source, scores in (results.get("against") or {}).get("differences", {}).items():
        for variable, number in scores.items():
            say(
                f"{printable(source)} {variable} against {results['against']['file']}: {number['value']:+.3f} {_interval(number)}, "
                f"p = {number['p_value']:.3g}; better on {number['num_better']} and worse on {number['num_worse']} "
                f"of {number['num_questions']} questions"
            )
    for difference in (results.get("against") or {}).get("differs", ()):
        say(f"also different: {printable(difference)}")


def mean_scores(
    questions: Sequence[Question], samples: Sequence[Sample], results: dict[str, Any], leave_out: set[int]
) -> dict[str, Numbers]:
    """By source: the mean of each score without some of the questions."""
    groups = _by_question([s for s in samples if s.failure is None and s.question not in leave_out])
    found: dict[str, Numbers] = {}
    for source, part in results.items():
        own = {i: group for i, group in groups.items() if questions[i].source == source}
        if own:
            found[source] = {name: next(iter(_numbers(own, name).values())) for name in part["scores"]}
    return found


def placed(names: Any) -> list[tuple[tuple[Any, ...], int]]:
    """((source, hash, how often it came before), position): the same question may be in a file twice."""
    seen: dict[Any, int] = defaultdict(int)
    places = []
    for position, name in enumerate(names):
        places.append(((*name, seen[name]), position))
        seen[name] += 1
    return places


def _by_question(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.question].append(sample)
    return groups


def _numbers(groups: dict[int, list[Sample]], variable: str) -> Numbers:
    """mean@n, pass@k (best@k where scores are more than right and wrong) and majority@k."""
    scores = [[sample.scores[variable] for sample in group] for group in groups.values()]
    preds = [[_pred(sample, variable) for sample in group] for group in groups.values()]
    has_preds = any(sample.preds for group in groups.values() for sample in group)
    is_share = all(score in (0.0, 1.0) for group in scores for score in group)
    names = {"mean": "mean", "best": "pass" if is_share else "best", "maj": "majority"}
    found = {}
    for name, number in score_summary(scores, preds if has_preds else None).items():
        kind, _, size = name.removesuffix("/mean").partition("@")
        if kind in names:
            found[f"{names[kind]}@{size}"] = _number(number)
    return found


def _pred(sample: Sample, variable: str) -> str:
    """The answer that votes; one without an answer votes for nothing that another does."""
    return sample.preds.get(variable, sample.preds.get("*", f"\0no answer {sample.number}"))


def _share(groups: dict[int, list[Sample]], holds: Callable[[Sample], bool]) -> dict[str, Any]:
    shares = [float(np.mean([holds(sample) for sample in group])) for group in groups.values()]
    return _number(estimate(shares, sum(map(len, groups.values()))))


def _number(number: Estimate) -> dict[str, Any]:
    low, high = number.interval or (None, None)
    return {"value": number.value, "low": low, "high": high}


def _interval(number: dict[str, Any]) -> str:
    return "-" if number["low"] is None else f"[{number['low']:.3f}, {number['high']:.3f}]"


# -- what differs from an earlier result besides the model -------------------------------------------------------------------------------


def judges_of(questions: Sequence[Question], manager: RewardManager, sandbox: Mapping[str, Any]) -> list[Judge]:
    """Return the judge of each question; `sandbox` are the settings of the sandbox for programs."""

    @functools.cache
    def of(tag: Any) -> Judge:
        return {
            name: _judge(manager, name, weight, tag.data_source, sandbox) for name, weight in manager.judges_of(tag, False).items()
        }

    return [of(question.tag) for question in questions]


def check_against(
    earlier: Mapping[str, Any],
    questions: Sequence[Question],
    judges: Sequence[Judge],
    template: Mapping[str, Any],
    drawing: Mapping[str, Any],
) -> list[str]:
    """Return what differs from an earlier result besides the model, in words.

    Raises DataError if fewer than two questions are in both, ConfigError if they had another judge.
    """
    old = {
        place: earlier["questions"][i].get("judge") for place, i in placed((e["source"], e["hash"]) for e in earlier["questions"])
    }
    common = [(place, i) for place, i in placed((q.source, q.hash) for q in questions) if place in old]
    if len(common) < 2:
        raise DataError(
            f"--against: {len(common)} of the {len(questions)} questions are in the earlier result; it was of other data, and a "
            "comparison needs two"
        )
    pairs = Counter((old[place], digest(judges[i])) for place, i in common) if judges else Counter()
    now = {digest(judge): judge for judge in judges}
    found = []
    for (before, after), count in pairs.items():
        if before not in earlier.get("judges", {}):
            found.append(f"the earlier result does not say who judged {count} of {len(common)} questions")
        elif before != after:
            found += _compared(earlier["judges"][before], now[after], f"{count} of {len(common)} questions")
    found += _template_differences(earlier.get("template", {}), template)
    was = earlier.get("sampling", {})
    names = [name for name, value in drawing.items() if name != "seed" and name in was and was[name] != _as_json(value)]
    return found + [f"{name} {was[name]} before, {drawing[name]} now" for name in names]


def _judge(manager: RewardManager, name: str, weight: float, source: str | None, sandbox: Mapping[str, Any]) -> dict[str, Any]:
    if name == MODEL:
        return {"weight": weight}
    found = manager.function(name, source)
    function = found.function
    settings = dict(sandbox) if found.takes_sandbox else {}
    while hasattr(function, "func"):  # a function of lists, or one with some of its arguments
        settings |= getattr(function, "keywords", {})
        function = function.func
    file = _file(function)
    return {
        "weight": weight,
        "function": f"{file.name if file else '?'}:{getattr(function, '__name__', type(function).__name__)}",
        "settings": redacted(_as_json(settings)),
        "code": digest(file.read_bytes()) if file else None,
    }


def _file(function: Callable[..., Any]) -> Path | None:
    try:
        name = inspect.getsourcefile(function if hasattr(function, "__code__") else type(function))
    except TypeError:
        return None
    return Path(name) if name and Path(name).is_file() else None


def _compared(before: Judge, after: Judge, which: str) -> list[str]:
    """Return what differs in a judge. Raises ConfigError if it is another judge.

    A file may have moved or have been edited, but not both.
    """

    def asked(judge: Judge) -> dict[str, Any]:
        return {
            name: [part["weight"], part.get("function", ":").partition(":")[2], part.get("settings")]
            for name, part in judge.items()
        }

    changed = [name for name in after if name in before and before[name].get("code") != after[name].get("code")]
    is_other = any(before[name].get("function") != after[name].get("function") for name in changed)
    if is_other or asked(before) != asked(after):
        raise ConfigError(
            f"--against: {which} had another judge: {_said(before)} before, {_said(after)} now; scores of two judges do not say which "
            "model is better. Give the reward.* keys of the earlier result, or leave --against out"
        )
    return [f"the code of {after[name]['function']}, which judged {which}" for name in changed]


def _said(judge: Judge) -> str:
    parts = []
    for name, part in judge.items():
        settings = ", ".join(f"{key}={value}" for key, value in (part.get("settings") or {}).items())
        weight = f"{part['weight']:g} x " if len(judge) > 1 or part["weight"] != 1 else ""
        parts.append(f"{weight}{part.get('function', name)}" + (f"({settings})" if settings else ""))
    return " + ".join(parts)


def _template_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if before.get("hash") == after.get("hash"):
        return []
    names = [name for name in after if name not in ("files", "hash") and before.get(name) != _as_json(after[name])]
    said = [f"{name} {before.get(name)!r} before, {after[name]!r} now" for name in names if name != "extraction"]
    return said or ["the task's examples or the code that asks and reads"]


def _as_json(value: Any) -> Any:
    """Return a value as a result file has it."""
    return json.loads(json.dumps(value, default=str))
