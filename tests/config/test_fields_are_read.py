"""A configuration field that nothing reads fails here.

The scan follows types, not names. An expression has the type of a section when it is a parameter annotated with it, a name or `self.x`
that such an expression was assigned to, `self.x` of a class that declares x with it, a field of an expression that has one,
`dataclasses.replace` of one, either branch of a conditional, or a call of a function whose return annotation names one. `X.field` is a
read when X has the type of the section that has the field, or of several (a union) of which some have it.

Not counted: the configuration's own checks (lockstep/config, trainer/ppo/checks.py). A property of a section counts for the fields that
it uses, as soon as the property itself is read. A field belongs to the section that defines it, whoever inherits it.
"""

import ast
import dataclasses
import re
from collections import defaultdict
from pathlib import Path

import pytest

import lockstep
from lockstep.config.keys import section_type
from lockstep.config.ppo import PPOConfig

PACKAGE = Path(lockstep.__file__).parent
CONFIG = PACKAGE / "config"
CHECKS = PACKAGE / "trainer" / "ppo" / "checks.py"
UNTYPED = {("RLHFDataset.__init__", "config"): "DataConfig"}
"""Parameters that are sections without saying so: function -> section. utils/ does not import config/."""

Types = frozenset[str]
Field = tuple[str, str]
NOTHING: Types = frozenset()


def schema(section=PPOConfig):
    """Section name -> its fields, each with the name of its section where it is one."""
    fields = {item.name: section_type(section, item.name) for item in dataclasses.fields(section)}
    sections = [kind for kind in fields.values() if dataclasses.is_dataclass(kind)]
    found = {section.__name__: {name: kind.__name__ if kind in sections else None for name, kind in fields.items()}}
    for kind in (*sections, *(base for base in section.__bases__ if dataclasses.is_dataclass(base))):
        found |= schema(kind)
    return found


def inherited(sections, definitions):
    """Section -> the sections that it inherits from directly."""
    classes = (node for tree in definitions for node in tree.body if isinstance(node, ast.ClassDef) and node.name in sections)
    return {node.name: [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in sections] for node in classes}


def return_types(trees, sections):
    """The functions that return a section, by name."""
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name: _annotated(node.returns, sections) for node in functions}


def reads_in(trees, sections, returns, untyped):
    """The fields and properties of `sections` that these modules read, by the function that reads them ("Class.method")."""
    found: dict[str, set[Field]] = defaultdict(set)
    attributes_of: dict[str, dict[str, Types]] = defaultdict(dict)
    for _ in range(2):  # a class may be defined in another file than the one it inherits attributes from
        for tree in trees:
            for owner, function in _functions(tree):
                if owner is None:
                    _Scope(sections, returns, untyped, found, {}, {}, "").visit_function(function)
            for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
                attributes = attributes_of[cls.name]
                for base in (node.id for node in cls.bases if isinstance(node, ast.Name)):
                    attributes.update({name: kind for name, kind in attributes_of[base].items() if name not in attributes})
                for member in cls.body:
                    if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                        known = attributes.get(member.target.id, NOTHING)
                        attributes[member.target.id] = known | _annotated(member.annotation, sections)
                own = {"self": frozenset({cls.name})} if cls.name in sections else {}
                for _ in range(3):  # until attributes that are made from other attributes are known
                    for owner, function in _functions(tree):
                        if owner is cls:
                            _Scope(sections, returns, untyped, found, attributes, own, f"{cls.name}.").visit_function(function)
    return found


class _Scope:
    """One function: what its names are, and what it reads. Functions inside it see its names."""

    def __init__(self, sections, returns, untyped, found, attributes, names, prefix):
        self.sections, self.returns, self.untyped, self.found, self.prefix = sections, returns, untyped, found, prefix
        self.attributes, self.names = attributes, dict(names)

    def visit_function(self, function):
        self.where = self.prefix + function.name
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            declared = self.untyped.get((self.where, argument.arg))
            self._assign(argument.arg, frozenset({declared}) if declared else _annotated(argument.annotation, self.sections))
        for _ in range(3):  # until names that are made from other names are known
            for node in ast.walk(function):
                if isinstance(node, ast.FunctionDef | ast.Lambda):
                    for argument in (*node.args.args, *node.args.kwonlyargs):
                        self._assign(argument.arg, _annotated(argument.annotation, self.sections))
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._bind(target, node.value)
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    self._bind(node.target, node.value)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.found[self.where] |= {(section, node.attr) for section in self._type(node.value)}

    def _bind(self, target, value):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one_target, one_value in zip(target.elts, value.elts, strict=False):
                self._bind(one_target, one_value)
        elif isinstance(target, ast.Name):
            self._assign(target.id, self._type(value))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.attributes[target.attr] = self.attributes.get(target.attr, NOTHING) | self._type(value)

    def _assign(self, name, types):
        if types:
            self.names[name] = self.names.get(name, NOTHING) | types

    def _type(self, node) -> Types:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NOTHING)
        if isinstance(node, ast.IfExp):
            return self._type(node.body) | self._type(node.orelse)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*map(self._type, node.values))
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            return self._type(node.args[0]) if called == "replace" and node.args else self.returns.get(called, NOTHING)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.attributes:
                return self.attributes[node.attr]
            kinds = (self.sections[section].get(node.attr) for section in self._type(node.value))
            return frozenset(kind for kind in kinds if kind)
        return NOTHING


def _functions(tree):
    """(class or None, function) of the module's functions and methods; functions inside functions belong to those."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node, member) for member in node.body if isinstance(member, ast.FunctionDef))


def _annotated(annotation, sections) -> Types:
    if annotation is None:
        return NOTHING
    return frozenset(re.findall(r"\w+", ast.unparse(annotation))) & sections.keys()


def unread(users, definitions, sections, untyped=UNTYPED):
    """The fields that no source of `users` reads, directly or through a property in `definitions`."""
    user_trees, definition_trees = [ast.parse(source) for source in users], [ast.parse(source) for source in definitions]
    returns = return_types(user_trees + definition_trees, sections)
    read = {field for fields in reads_in(user_trees, sections, returns, untyped).values() for field in fields}
    through_property = reads_in(definition_trees, sections, returns, {})
    bases = inherited(sections, definition_trees)
    pending = list(read)
    while pending:
        section, name = pending.pop()
        new = through_property.get(f"{section}.{name}", set()) | {(base, name) for base in bases.get(section, ())}
        pending += new - read
        read |= new
    own = {s: fields.keys() - {name for base in bases.get(s, ()) for name in sections[base]} for s, fields in sections.items()}
    return sorted(f"{s}.{name}" for s, fields in own.items() for name in fields if (s, name) not in read)


@pytest.mark.slow
def test_every_field_of_the_configuration_is_read_somewhere():
    users = [path.read_text() for path in PACKAGE.rglob("*.py") if CONFIG not in path.parents and path != CHECKS]
    definitions = [path.read_text() for path in CONFIG.glob("*.py")]
    assert unread(users, definitions, schema()) == []


SECTIONS = {"Root": {"inner": "Inner", "other": "Other"}, "Inner": {"a": None, "b": None}, "Other": {"a": None, "c": None}}
DEFINITIONS = """
class Inner:
    def __post_init__(self) -> None:
        check(self.a, self.b)
    @property
    def doubled(self) -> int:
        return self.both
    @property
    def both(self) -> int:
        return self.a + self.b
"""
INNER, OTHER = ["Inner.a", "Inner.b"], ["Other.a", "Other.c"]


def check_scan(source, expected, untyped=None):
    assert unread([source], [DEFINITIONS], SECTIONS, untyped or {}) == sorted(expected)


def test_the_scan_follows_parameters_names_attributes_and_calls():
    check_scan("", [*INNER, *OTHER, "Root.inner", "Root.other"])
    check_scan("def f(x: Root) -> int:\n    return x.inner.a", ["Inner.b", *OTHER, "Root.other"])
    check_scan(
        "def f(x: Root):\n    inner, n = x.inner, 1\n    def g():\n        return inner.b\n", ["Inner.a", *OTHER, "Root.other"]
    )
    check_scan(
        "class C:\n    x: Inner | None\n    def f(self):\n        return self.x.a", ["Inner.b", *OTHER, "Root.inner", "Root.other"]
    )
    source = "def f(x: 'Inner | None', n=1):\n    y = dataclasses.replace(x, a=1)\n    return y.b"
    check_scan(source, ["Inner.a", *OTHER, "Root.inner", "Root.other"])
    check_scan("def f(x: Inner | Other):\n    return x.a", ["Inner.b", "Other.c", "Root.inner", "Root.other"])
    check_scan("def f(r: Root, on):\n    s = r.inner if on else r.other\n    return s.a", ["Inner.b", "Other.c"])
    check_scan(
        "class W:\n    def use(self):\n        return self.part.c\n    def __init__(self, root: Root):\n"
        "        self.root = root\n        self.part, self.n = self.root.other, 1\n",
        [*INNER, "Other.a", "Root.inner"],
    )
    check_scan("def make() -> Inner: ...\ndef use():\n    return make().b", ["Inner.a", *OTHER, "Root.inner", "Root.other"])
    check_scan("def f(x):\n    return x.c", [*INNER, "Other.a", "Root.inner", "Root.other"], {("f", "x"): "Other"})


def test_the_scan_is_not_fooled_by_the_same_name_elsewhere():
    everything = [*INNER, *OTHER, "Root.inner", "Root.other"]
    check_scan("def f(x, y: int):\n    return x.a + y.b", everything)
    check_scan("def f(x: Inner):\n    x.a = 1", everything)
    check_scan("def f(x: Other):\n    return x.a", ["Other.c", *INNER, "Root.inner", "Root.other"])
    check_scan("def f(x: Inner): ...\ndef g(x):\n    return x.a", everything)


def test_a_property_counts_for_its_fields_only_when_it_is_read():
    check_scan("def f(x: Root):\n    return x.inner", [*INNER, *OTHER, "Root.other"])
    check_scan("def f(x: Root):\n    return x.inner.doubled", [*OTHER, "Root.other"])
