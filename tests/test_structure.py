"""Small enough to read: the length of functions and files, and no import cycle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lockstep"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450


def module_of(path):
    """`lockstep.a.b` for lockstep/a/b.py, `lockstep.a` for lockstep/a/__init__.py."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def test_no_function_is_long():
    long = {
        f"{module_of(path)}.{node.name}": lines
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
        and not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)  # a kernel is one function
    }
    assert long == {}


def test_no_file_is_long():
    long = {module_of(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}


def imports_when_loaded(tree, module):
    """Modules of ours that are imported when `module` is: not those inside functions or under TYPE_CHECKING."""
    for node in statements_when_loaded(tree.body):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            target = name if name in MODULES else name.rpartition(".")[0]
            if target in MODULES and target != module:
                yield target


def statements_when_loaded(body):
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements_when_loaded(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "finalbody"):
                yield from statements_when_loaded(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements_when_loaded(handler.body)


def check_order(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_module_imports_itself_by_way_of_others():
    check_order({module: set(imports_when_loaded(ast.parse(path.read_text()), module)) for module, path in MODULES.items()})


def test_a_cycle_would_be_found():
    with pytest.raises(pytest.fail.Exception, match="a -> b -> a|b -> a -> b"):
        check_order({"a": {"b"}, "b": {"a"}})
