from lockstep.data.tag import Tag


def test_a_tag_does_not_depend_on_the_order_of_its_weights():
    """A parquet file may have sorted them."""
    one, other = ({"weights": weights} for weights in ({"rule": 1.0, "model": 0.5}, {"model": 0.5, "rule": 1.0, "code": None}))
    assert Tag.of("x", one) == Tag.of("x", other)
