import pytest

from lockstep.algorithms.registry import registering, unknown_name
from lockstep.errors import ConfigError


def test_the_error_for_an_unknown_name_says_the_nearest_and_all_known_ones():
    error = unknown_name("fruit", "Aple", ["apple", "pear"])
    assert isinstance(error, ConfigError)
    assert str(error) == "unknown fruit 'Aple'; did you mean 'apple'? Known: apple, pear"


def test_no_nearest_name_is_invented_when_none_is_near():
    assert str(unknown_name("fruit", "xyz", ["apple"])) == "unknown fruit 'xyz'. Known: apple"


def test_a_name_can_be_registered_once():
    table = {}
    assert registering("fruit", table, "apple")(len) is len
    assert registering("fruit", table, "apple")(len) is len
    with pytest.raises(ConfigError, match="'apple' is already registered"):
        registering("fruit", table, "apple")(max)
    assert table == {"apple": len}
