import pytest

from lockstep.tools.evaluate.answerers import Answerer, AnswerSampling
from lockstep.tools.evaluate.questions import Question, Sample
from lockstep.tools.evaluate.results import summarise
from lockstep.tools.evaluate.scoring import ask_and_judge, choose


class Says(Answerer):
    """Answers with the question's own text, the last first; a question "none" gets no answer."""

    def about(self):
        return {}

    def answer(self, questions, drawing):
        for i in reversed(range(len(questions))):
            for k in range(drawing.n):
                failure = "gone" if questions[i].text == "none" else None
                yield Sample(i, k, f"{questions[i].text}{k}", "error" if failure else "stop", failure=failure)

    def log_likelihoods(self, questions):
        return [[-5.0, -6.0], [-1.0, -9.0]]


def question(text, truth="a0"):
    columns = {"data_source": "s", "reward_model": {"ground_truth": truth}, "extra_info": None}
    return Question("s", text, text, False, columns)


def test_each_answer_has_its_scores_and_what_cannot_be_judged_its_reason():
    def judge(data_source, solution_str, ground_truth, extra_info):  # in here, so that it runs in a thread
        if solution_str == "raise0":
            raise RuntimeError("cannot judge this")
        right = solution_str == ground_truth
        return {"score": float(right), "acc": right, "pred": solution_str, "note": "seen", "reward": 9.0}

    heard = []
    questions = [question("a"), question("raise"), question("none"), question("b")]
    samples = ask_and_judge(
        Says(), questions, AnswerSampling(n=2, temperature=1.0), {"compute_score": judge}, lambda: heard.append(1)
    )
    assert [(sample.question, sample.number) for sample in samples] == [(i, k) for i in range(4) for k in range(2)]
    assert [sample.scores.get("reward") for sample in samples] == [1.0, 0.0, None, 0.0, None, None, 0.0, 0.0]
    assert samples[0].scores == {"reward": 1.0, "acc": 1.0, "said_reward": 9.0}
    assert (samples[0].preds, samples[0].extra) == ({"*": "a0"}, {"note": "seen"})
    assert "cannot judge this" in samples[2].failure
    assert samples[4].failure == "gone"
    assert len(heard) == 8
    found = summarise(questions, samples, None)["s"]
    assert (found["num_missing"], list(found["scores"])) == (3, ["acc"])
    assert found["scores"]["acc"]["mean@2"]["value"] == pytest.approx((0.5 + 0 + 0) / 3)


def test_numbers_of_a_reward_that_are_not_finite_are_no_scores_of_it():
    def judge(solution_str):
        return {"score": 1.0, "huge": 10**400, "nan": float("nan"), "fine": 2}

    (sample,) = ask_and_judge(Says(), [question("a")], AnswerSampling(n=1, temperature=1.0), {"compute_score": judge}, lambda: None)
    assert sample.failure is None
    assert sample.scores == {"reward": 1.0, "fine": 2.0}
    assert set(sample.extra) == {"huge", "nan"}


def test_the_likeliest_choice_is_taken_as_it_is_and_per_character():
    def asked(label):
        return Question("h", "", "", True, {"extra_info": {"label": label}}, choices=(" ab", " a longer ending"))

    samples = choose(Says(), [asked(0), asked(0)])
    assert [sample.scores for sample in samples] == [{"acc": 1.0, "acc_norm": 0.0}, {"acc": 1.0, "acc_norm": 1.0}]
    assert (samples[0].text, samples[0].extra) == (" ab", {"log_likelihoods": [-5.0, -6.0]})
    assert "cut_by_length" not in summarise([asked(0), asked(0)], samples, ["acc"])["h"]
