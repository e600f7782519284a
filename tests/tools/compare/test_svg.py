from xml.etree import ElementTree

import pytest
from helpers.comparisons import make_comparison

from lockstep.tools.compare.svg import draw_comparison

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
