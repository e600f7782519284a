from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.judging.math.spelling import spell
from lockstep.judging.math.structure import Group, equal, parse
from lockstep.judging.math.values import Comparator, Leaf, Undecided

small = st.integers(-999, 999)


def read(text):
    return parse(spell(text))


def is_equal(answer, truth):
    return equal(read(answer), read(truth), Comparator())


@settings(max_examples=50, deadline=None)
@given(st.lists(small, min_size=2, max_size=6, unique=True), st.randoms())
def test_only_lists_and_unions_have_no_order(values, shuffler):
    other = list(values)
    shuffler.shuffle(other)
    one, two = (", ".join(map(str, v)) for v in (values, other))
    assert is_equal(one, two)
    assert is_equal(rf"\{{{one}\}}", two)
    assert is_equal(f"({one})", f"({two})") == (values == other)
    assert is_equal(f"[{one}]", f"[{two}]") == (values == other)
    assert not is_equal(one, f"{two}, 1000")
    intervals = [r"\cup".join(f"[{v},{v + 1})" for v in order) for order in (values, other)]
    assert is_equal(*intervals)


@settings(max_examples=50, deadline=None)
@given(small, small, st.sampled_from(["<", r"\le"]), st.sampled_from(["<", r"\le"]))
def test_an_inequality_is_its_interval(low, high, left, right):
    interval = f"{'(' if left == '<' else '['}{low},{high}{')' if right == '<' else ']'}"
    assert is_equal(f"{low} {left} x {right} {high}", interval)
    mirrored = {"<": ">", r"\le": r"\ge"}
    assert is_equal(f"{high} {mirrored[right]} x {mirrored[left]} {low}", interval)
    assert not is_equal(f"{low} {left} x {right} {high + 1}", interval)


@settings(max_examples=50, deadline=None)
@given(st.lists(small, min_size=4, max_size=4))
def test_a_matrix_is_the_same_in_any_brackets_and_has_an_order(values):
    a, b, c, d = values
    body = rf"{a} & {b} \\ {c} & {d}"
    assert is_equal(rf"\begin{{bmatrix}}{body}\end{{bmatrix}}", rf"\begin{{pmatrix}}{body} \\ \end{{pmatrix}}")
    assert is_equal(rf"\begin{{pmatrix}}{body}\end{{pmatrix}}", rf"\begin{{pmatrix}}{a}&{c}\\{b}&{d}\end{{pmatrix}}") == (b == c)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("5", Leaf("5")),
        (r"5\text{ cm}^2", Leaf("5", "cm^2")),
        (r"\$5", Leaf("5", "dollar")),
        (r"5\%", Leaf("5", "percent")),
        (r"5\text{ apples}", Leaf("5", "?")),
        (r"\sin 30^\circ", Leaf(r"\sin30^\circ")),
        ("x = 5", Group("=", (Leaf("x"), Leaf("5")))),
        ("x > 5", Group("<", (Leaf("5"), Leaf("x")))),
        (r"x \in [1,2)", Group("[)", (Leaf("1"), Leaf("2")))),
        (r"\pm 2", Group("list", (Leaf("2"), Leaf("-2")))),
        (r"\mathbb{R}", Group("()", (Leaf(r"-\infty"), Leaf(r"\infty")))),
        (r"\{(1,2)\}", Group("()", (Leaf("1"), Leaf("2")))),
        ("f(1,2)", Leaf("f(1,2)")),
        ("", Leaf("")),
    ],
)
def test_answers_are_taken_apart(text, node):
    assert read(text) == node


def test_what_needs_algebra_is_left_open():
    with pytest.raises(Undecided):
        is_equal("x+1", "1+x")


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=r"\frac{sqtexbo}12 .,=<>/-$%^_[]()|:;&~!'", max_size=60))
def test_anything_can_be_spelled_and_parsed(text):
    node = read(text)
    assert node == Leaf("") or equal(node, node, Comparator())


def test_deep_nesting_is_not_taken_apart():
    deep = "(" * 900 + "1,2" + ")" * 900
    assert isinstance(read(deep), Group | Leaf)
