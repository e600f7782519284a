"""The tables, the JSON and the picture of a comparison."""

import dataclasses
import io
import json
from xml.etree import ElementTree

import pytest
from helpers.comparisons import make_comparison

from lockstep.tools.compare.report import draw_comparison, print_comparison, visible


def printed(comparison):
    stream = io.StringIO()
    print_comparison(comparison, stream)
    return stream.getvalue()


def test_the_tables_have_every_number_and_every_reason():
    text = printed(make_comparison())
    for expected in ("1.234", "0.250", "0.125", "0.5", "-0.750", "ppo: it reads the column values", "step 7", "lr 0.001"):
        assert expected in text, expected


def test_a_number_that_does_not_exist_is_a_dash():
    rows = [line.split() for line in printed(make_comparison()).splitlines() if line.startswith("silent_one")]
    assert rows[0][-1] == "-"
    assert "(3) silent_one - - -" in [" ".join(line.split()) for line in printed(make_comparison()).splitlines()]


def test_no_number_and_no_name_is_cut_by_long_texts_many_algorithms_or_a_narrow_terminal(monkeypatch):
    comparison = make_comparison(token="x" * 500)
    names = [f"quite_a_long_name_{i}" for i in range(20)]
    comparison = dataclasses.replace(
        comparison,
        results=[dataclasses.replace(comparison.results[0], name=name) for name in names],
        cosines=[[0.123] * 20] * 20,
    )
    for width, is_terminal in (("40", True), ("80", False)):
        monkeypatch.setenv("COLUMNS", width)
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        print_comparison(comparison, stream)
        lines = stream.getvalue().split("the tokens pushed most")
        assert "…" not in lines[0]
        assert lines[0].count("0.123") == 400
        pushed = [line.split("[xxx")[0] for line in lines[1].splitlines() if "[xxx" in line]
        assert pushed
        assert not [line for line in pushed if "…" in line]
        assert {line.split()[0] for line in pushed} == set(names)


def test_markup_in_tokens_and_names_is_text():
    text = printed(make_comparison(token="[bold]x", name="[red]mine"))
    assert "[[bold]x]" in text
    assert "[red]mine" in text


def test_what_cannot_be_shown_is_a_sign():
    assert visible("a\nb\tc\x00\x1b\u200f ") == "a↵b⇥c��� "
    assert "\x1b" not in printed(make_comparison(token="\x1b[2J"))


def test_the_json_has_everything():
    comparison = make_comparison()
    data = json.loads(comparison.to_json())
    assert data["cosines"] == comparison.cosines
    assert data["results"][0]["pushed_up"][0]["token"] == comparison.results[0].pushed_up[0].token
    assert data["not_comparable"] == [["ppo", "it reads the column values"]]


SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    shown = ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    return [text.replace("\xa0", " ").strip() for text in shown]


def test_the_picture_names_every_algorithm_and_shows_every_cosine():
    shown = texts(draw_comparison(make_comparison()))
    assert shown.count("grpo") == 3  # in the gradients, the responses and the excerpts
    assert shown.count("(1)") == 2  # its row and its column of the cosines
    assert shown.count("-0.75") == 2
    assert shown.count("-") >= 5  # the cosines of the gradient that is zero
    assert any("ppo: not comparable" in text for text in shown)


@pytest.mark.parametrize("token", ["<b>&", "\x00\x0b\ud800", "\n", "漢字", '"', "e\u0301"])
def test_any_token_gives_well_formed_xml(token):
    draw_comparison(make_comparison(token=token, name=f"name {token}")).encode()
    texts(draw_comparison(make_comparison(token=token, name=f"name {token}")))


def test_nothing_lies_outside_the_page():
    root = ElementTree.fromstring(draw_comparison(make_comparison(rows=400)))
    width, height = float(root.get("width")), float(root.get("height"))
    for node in root.iter(f"{SVG}rect"):
        assert float(node.get("x", 0)) + float(node.get("width")) <= width
        assert float(node.get("y", 0)) + float(node.get("height")) <= height


def test_a_push_up_is_blue_and_a_push_down_is_red():
    picture = draw_comparison(make_comparison())
    # The largest pushes of grpo, up and down, at full strength.
    assert "#2166ac" in picture
    assert "#b2182b" in picture


def test_a_large_batch_is_cut_and_says_so():
    shown = texts(draw_comparison(make_comparison(rows=400)))
    assert any("the first 256 of 400" in text for text in shown)
