"""The strange responses are as strange as they say."""

import pickle

from lockstep.tools.reward_check.fuzz import Earns, cheap_responses, odd_responses


def test_the_responses_are_as_long_deep_and_odd_as_their_names_say():
    odd = {response.name: response.text for response in odd_responses("#### 42", "#### 7")}
    assert 100_000 <= len(odd["nested LaTeX, 100 kB"].encode()) < 110_000
    assert odd["nested LaTeX, 100 kB"].count("{") == odd["nested LaTeX, 100 kB"].count("}") > 10_000
    assert 999_000 <= len(odd["1 MB of text"].encode()) <= 1_000_000
    assert odd["two answers, the last one wrong"] == "#### 42\n\n#### 7"
    assert odd["full-width digits"] == "#### \uff14\uff12"
    assert any(0xD800 <= ord(c) < 0xE000 for c in odd["lone surrogates"])
    assert len(set(odd.values())) == len(odd)


def test_only_a_right_answer_in_another_spelling_may_be_paid():
    for response in [*cheap_responses("What is 6 * 7?"), *odd_responses("#### 42", "#### 7")]:
        is_right = "42" in response.text or "\uff14\uff12" in response.text
        assert (response.earns is Earns.ANYTHING) == (is_right and "7" not in response.text)


def test_every_response_reaches_another_process_unchanged():
    for response in [*cheap_responses("prompt"), *odd_responses(None, None)]:
        assert pickle.loads(pickle.dumps(response)) == response
