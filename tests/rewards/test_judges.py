import pytest

from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError
from lockstep.rewards.judges import Judges


def judge(**row):
    return 0.0


@pytest.mark.parametrize(
    ("tag", "has_model", "expected"),
    [
        (Tag("openai/gsm8k", "rule"), False, {"rule": 1.0}),
        (Tag("openai/gsm8k", "rule"), True, {"rule": 1.0}),
        (Tag("openai/gsm8k", "model"), True, {"model": 1.0}),
        (Tag("openai/gsm8k", "model"), False, {"rule": 1.0}),  # validation has no model
        (Tag("chat"), True, {"model": 1.0}),
        (Tag(None), True, {"model": 1.0}),
        (Tag("mine", has_test_cases=True), True, {"sandbox": 1.0}),
        (Tag("openai/gsm8k", weights=(("rule", 0.5), ("model", 2.0))), True, {"rule": 0.5, "model": 2.0}),
        (Tag("openai/gsm8k", weights=(("rule", 0.5), ("model", 2.0))), False, {"rule": 0.5}),
        (Tag("mixed"), True, {"model": 1.0, "length": 0.1}),
        (Tag("mixed"), False, {"length": 0.1}),
    ],
)
def test_the_tag_decides(tag, has_model, expected):
    judges = Judges(functions={"length": judge}, weights={"mixed": {"model": 1.0, "length": 0.1}})
    assert judges.of(tag, has_model) == expected


def test_a_star_stands_for_every_other_data_source_and_a_row_overrides_it():
    judges = Judges(weights={"*": {"rule": 2.0}, "a": {"sandbox": 1.0}})
    assert judges.of(Tag("openai/gsm8k"), False) == {"rule": 2.0}
    assert judges.of(Tag("a"), False) == {"sandbox": 1.0}
    assert judges.of(Tag("a", weights=(("model", 1.0),)), True) == {"model": 1.0}


def test_a_row_that_nobody_can_judge_names_its_data_source():
    with pytest.raises(NotImplementedError, match="'my/data'"):
        Judges().of(Tag("my/data"), has_model=False)
    with pytest.raises(DataError, match=r"no 'data_source'.*data\.train_files.*reward\.custom_reward_function\.path"):
        Judges().of(Tag(None), has_model=False)
    assert Judges(compute_score=judge).of(Tag(None), has_model=False) == {"rule": 1.0}


def test_a_built_in_rule_needs_a_ground_truth_and_a_users_own_may_do_without():
    for source in ("openai/gsm8k", "lockstep/reverse"):
        with pytest.raises(DataError, match=rf"data_source '{source}' have no reward_model\.ground_truth"):
            Judges().of(Tag.of(source, {"style": "rule"}), has_model=False)
    assert Judges().of(Tag.of("mbpp", {"test_cases": ["assert f(1)"]}), has_model=False) == {"sandbox": 1.0}
    assert Judges(compute_score=judge).of(Tag.of("a", None), has_model=False) == {"rule": 1.0}


def test_judges_that_are_not_there_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"reward\.weights\.a names the judge 'modle'; known: rule, model, sandbox"):
        Judges(weights={"a": {"modle": 1.0}})
    with pytest.raises(ConfigError, match="data_source 'b'"):
        Judges().of(Tag("b", weights=(("style", 1.0),)), True)
    with pytest.raises(ConfigError, match="that name is taken"):
        Judges(functions={"model": judge})


def test_a_tag_is_read_from_the_columns_of_a_row():
    assert Tag.of("a", None) == Tag("a", has_truth=False)
    assert Tag.of("a", {"style": "rule", "ground_truth": "1"}) == Tag("a", "rule")
    # Parquet gives every row of a file the fields that one of them has.
    row = {"style": None, "ground_truth": "1", "test_cases": None, "weights": {"rule": 1, "model": None}}
    assert Tag.of("a", row) == Tag("a", weights=(("rule", 1.0),))
    with pytest.raises(DataError, match="must map judges to numbers"):
        Tag.of("a", {"weights": "rule"})
