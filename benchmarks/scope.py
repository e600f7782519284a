"""Is the library's old scope smaller? Code tokens of what stood when "One flat path" was filed, then and now.

The library has grown since by whole capabilities: SFT, DPO, agents, `serve` and others. They say nothing about the old part, so this counts
the old part alone, definition by definition (a function, a method, a class without its methods, the statements of a module):

- BASE is the commit at which the issue was filed. Its tokens are the whole.
- SPLIT is the last commit with work on this issue alone: what it holds is the old scope. Other issues came after it.
- A definition of SPLIT that still stands counts with the smaller of its sizes then and now: what it grew by came with another issue.
- What shrank or is gone may have been taken over by new code in the same place, a file of SPLIT with the files that took parts of it
  (MOVED). A definition under a new name took something over when at least SHARE of its tokens stand in runs of RUN tokens that the place
  lost; others are a new capability. In each place the smaller of "tokens missing" and "tokens that took over" is counted too.
- Other files that SPLIT does not have are new capabilities (`--files` lists them).

So a function that is split, renamed or moved gains nothing; only deleted code does. The last line counts everything under a new name in
an old place as taken over, whatever it is: no rule can give more.

usage: python benchmarks/scope.py [--files] [--places]     in a checkout with its history
"""

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

BASE, SPLIT = "5e3a00a", "01a4fb4"
RUN, SHARE = 4, 0.15
MODULE = "<module>"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

# New files that took parts of files of SPLIT. In doubt a file is here: that can only make the count larger.
MOVED = {
    "algorithms/blocks.py": ["compat/verl.py"],
    "algorithms/advantages/group.py": ["algorithms/advantages/group.py"],
    "algorithms/policy_losses/clipped.py": ["algorithms/policy_losses/per_token.py"],
    "checkpoint/saver.py": ["checkpoint/folders.py"],
    "compat/core_algos.py": ["compat/verl.py"],
    "observability/dashboards.py": ["observability/trackers.py"],
    "observability/eta.py": ["observability/display.py"],
    "observability/score_summary.py": ["trainer/ppo/validation.py"],
    "judging/sandbox/program.py": ["judging/sandbox/judge.py"],
    "judging/sandbox/same.py": ["judging/sandbox/judge.py"],
    "single_controller/ray/leftovers.py": ["single_controller/ray/cluster.py"],
    "trainer/run/launch.py": ["trainer/ppo/launch.py"],
    "trainer/run/memory.py": ["trainer/ppo/memory.py"],
    "trainer/ppo/roles.py": ["trainer/ppo/launch.py", "trainer/main_ppo.py"],
    "trainer/run/program.py": ["trainer/main_ppo.py"],
    "trainer/run/resources.py": ["trainer/ppo/resources.py"],
    "trainer/role.py": ["trainer/ppo/role.py"],
    "trainer/run/stop.py": ["trainer/run/loop.py"],
    "generation/cpu/passes.py": [f"generation/cpu/{name}.py" for name in ("backend", "invariant", "paged")],
    "generation/gpu/short_prefill.py": ["generation/gpu/prefill.py"],
    "generation/stream.py": ["generation/generation.py", "generation/engine.py"],
    "workers/rollout/request.py": ["workers/rollout/base.py"],
    "backends/vllm/stream.py": ["backends/vllm/engine.py"],
}

Definitions = dict[str, list[str]]
"""Name -> its code tokens."""
Library = dict[str, Definitions]
"""File -> its definitions."""


def definitions(text: str) -> Definitions:
    """The functions, methods and classes (without their methods) of a module; MODULE has the rest. Without comments and docstrings."""
    tree = ast.parse(text)
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docs = {string.lineno for string in strings if isinstance(string.value, str)}
    owners: dict[int, str] = {}

    def own(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                owners.update(dict.fromkeys(range(first, (node.end_lineno or first) + 1), prefix + node.name))
                if isinstance(node, ast.ClassDef):
                    own(node.body, f"{prefix}{node.name}.")

    own(tree.body, "")
    found: Definitions = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and not (token.type == tokenize.STRING and token.start[0] in docs):
            found[owners.get(token.start[0], MODULE)].append(token.string)
    return dict(found)


def at_commit(commit: str) -> Library:
    """The library at a commit."""
    archive = subprocess.run(["git", "archive", commit, "lockstep"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        texts = {member.name: tar.extractfile(member) for member in tar if member.name.endswith(".py")}
        return {
            name.removeprefix("lockstep/"): definitions(file.read().decode()) for name, file in texts.items() if file is not None
        }


def now(folder: Path = Path("lockstep")) -> Library:
    """The library as it lies in this checkout."""
    return {str(path.relative_to(folder)): definitions(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def total(library: Library) -> int:
    """All tokens, as bench/tokens.py counts them."""
    return sum(len(tokens) for file in library.values() for tokens in file.values())


def places(old: Iterable[str], moved: Mapping[str, list[str]]) -> dict[str, str]:
    """File, old or in `moved` -> its place, named by one of its old files."""
    place = {file: file for file in old}
    for new, sources in moved.items():
        members = {place.get(file, file) for file in [*sources, new]}
        name = min(members & place.keys())
        place = {file: name if at in members else at for file, at in place.items()} | {new: name}
    return place


def pairs(old: Library, new: Library) -> Iterator[tuple[str, str, str]]:
    """(old file, new file, name) of definitions that are the same: first in the same file, then of the same name elsewhere."""
    left = {(file, name) for file, found in new.items() for name in found}
    elsewhere = []
    for file, found in old.items():
        for name in found:
            if (file, name) in left:
                left.remove((file, name))
                yield file, file, name
            elif name != MODULE:
                elsewhere.append((file, name))
    by_name = defaultdict(list)
    for file, name in sorted(left):
        by_name[name].append(file)
    for file, name in elsewhere:
        if by_name[name]:
            yield file, by_name[name].pop(), name


def runs(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    """Every RUN neighbouring tokens."""
    return [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]


def share_taken_over(tokens: Sequence[str], lost: set[tuple[str, ...]]) -> float:
    """How many of the tokens stand in a run that was lost."""
    known = {i + k for i, run in enumerate(runs(tokens)) if run in lost for k in range(RUN)}
    return len(known) / max(len(tokens), 1)


def old_scope(old: Library, new: Library, moved: Mapping[str, list[str]], least: float) -> tuple[int, dict[str, tuple[int, int]]]:
    """(tokens of the old scope now, place -> (tokens missing, tokens that took over)); `least` is the share that makes a take-over."""
    place = places(old, moved)
    counted, missing = 0, Counter(dict.fromkeys(place.values(), 0))
    lost: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    gone = {(file, name) for file, found in old.items() for name in found}
    fresh = {(file, name) for file, found in new.items() if file in place for name in found}
    for old_file, new_file, name in pairs(old, new):
        then, today = old[old_file][name], new[new_file][name]
        counted += min(len(then), len(today))
        gone.remove((old_file, name))
        fresh.discard((new_file, name))
        if len(then) > len(today):
            missing[place[old_file]] += len(then) - len(today)
            lost[place[old_file]].update(runs(then))
    for file, name in gone:
        missing[place[file]] += len(old[file][name])
        lost[place[file]].update(runs(old[file][name]))
    taken: Counter[str] = Counter()
    for file, name in fresh:
        if share_taken_over(new[file][name], lost[place[file]]) >= least:
            taken[place[file]] += len(new[file][name])
    counted += sum(min(missing[at], taken[at]) for at in missing)
    return counted, {at: (missing[at], taken[at]) for at in sorted(missing)}


def main() -> None:
    """Print the two numbers and their ratio."""
    parser = argparse.ArgumentParser(description="Code tokens of the library's old scope, then and now.")
    parser.add_argument("--files", action="store_true", help="list the files that are new capabilities")
    parser.add_argument("--places", action="store_true", help="list what is missing and what took over in each place")
    args = parser.parse_args()
    base, old, new = total(at_commit(BASE)), at_commit(SPLIT), now()
    counted, at = old_scope(old, new, MOVED, SHARE)
    if args.files:
        for file, found in new.items():
            if file not in old and file not in MOVED:
                print(f"{sum(map(len, found.values())):7,} {file}")
    if args.places:
        for place, (missing, taken) in at.items():
            if missing:
                print(f"{place:50} missing {missing:6,}  taken over {taken:6,}  counted again {min(missing, taken):6,}")
    at_most = old_scope(old, new, MOVED, 0.0)[0]
    print(f"the whole library now   {total(new):8,}")
    print(f"old scope when filed    {base:8,}  ({BASE})")
    print(f"old scope now           {counted:8,}  {counted / base:.4f}")
    print(f"at most                 {at_most:8,}  {at_most / base:.4f}")


if __name__ == "__main__":
    main()
