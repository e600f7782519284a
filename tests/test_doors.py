"""Doors of rooms: every name that a door offers can be imported, and type checkers see the same names."""

import ast
import importlib
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent
DOORS = [path.parent.name for path in sorted(PACKAGE.glob("*/__init__.py")) if "lazy_names(" in path.read_text()]


def names_for_type_checkers(tree):
    """Names that the door imports under TYPE_CHECKING."""
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {alias.name for block in blocks for statement in block.body for alias in statement.names}


def names_on_first_use(tree):
    """Names in the mapping that the door gives to `lazy_names`."""
    [mapping] = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return {name for value in mapping.values for name in value.value.split()}


@pytest.mark.parametrize("room", DOORS)
def test_a_door_offers_what_type_checkers_see(room):
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    assert names_on_first_use(tree) == names_for_type_checkers(tree)


@pytest.mark.parametrize("room", DOORS)
def test_every_name_of_a_door_can_be_imported(room):
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    door = importlib.import_module(f"lockstep.{room}")
    for name in sorted(names_on_first_use(tree)):
        try:
            getattr(door, name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # a machine without a GPU does not have it
                raise
