import pytest

from lockstep.tools.check.command import main

LOSSES = """
from lockstep.algorithms.masking import zero_outside


def good(*, old_log_prob, log_prob, advantages, response_mask, slope=1.0):
    ratio = zero_outside(log_prob - old_log_prob, response_mask).clamp(-20, 20).exp()
    return -slope * zero_outside(advantages, response_mask) * ratio, {}


def scalar(*, old_log_prob, log_prob, advantages, response_mask):
    return good(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)[0].mean(), {}


def micro_batch_mean(*, old_log_prob, log_prob, advantages, response_mask):
    loss, metrics = good(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    return loss / response_mask.sum().clamp(min=1), metrics


def reads_garbage(*, old_log_prob, log_prob, advantages, response_mask):
    return -advantages * (log_prob - old_log_prob).exp() * response_mask, {}


def raises(*, log_prob, response_mask):
    raise KeyError("oops")


def batch_mean(*, token_level_rewards, response_mask):
    scores = zero_outside(token_level_rewards, response_mask).sum(1)
    advantages = zero_outside((scores - scores.mean())[:, None].expand(response_mask.shape), response_mask)
    return advantages, advantages


def pair(*, log_prob, slope=1.0):
    return slope * (log_prob[:, 1] - log_prob[:, 0]), log_prob


def pair_mean(*, log_prob):
    loss, rewards = pair(log_prob=log_prob)
    return loss / max(len(loss), 1), rewards


def pair_scalar(*, log_prob):
    return log_prob.sum(), log_prob


def backwards(*, log_prob):
    return log_prob[:, 0] - log_prob[:, 1], log_prob


def to_go(*, token_level_rewards, response_mask, gamma):
    rewards = zero_outside(token_level_rewards, response_mask)
    togo = zero_outside(rewards.flip(1).cumsum(1).flip(1), response_mask)
    return togo * gamma, togo
"""


@pytest.fixture
def run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(LOSSES)

    def call(kind, function, *more):
        status = main([kind, f"{tmp_path / 'mine.py'}:{function}", "--examples", "25", *more])
        return status, capsys.readouterr()

    return call


def test_a_good_loss_and_a_good_estimator_pass(run):
    status, shown = run("loss", "good", "slope=2")
    assert status == 0
    assert shown.out.count("  ok  ") == 8
    assert "every property holds" in shown.out
    status, shown = run("advantage", "to_go", "gamma=0.5")
    assert status == 0, shown.out


def test_a_loss_that_depends_on_the_batching_is_shown_with_the_smallest_batch(run):
    status, shown = run("loss", "micro_batch_mean")
    assert status == 1
    assert shown.out.count("FAILED") == 1
    assert "ok       masked tokens" in shown.out
    example = shown.out[shown.out.index("FAILED   micro-batches and ranks") :]
    # Two rows are needed to see it, and a column or two; what makes batches smaller may stop at three.
    (log_prob,) = [line for line in example.splitlines() if line.strip().startswith("log_prob")][:1]
    assert log_prob.count("[") == 2
    assert max(row.count(" ") for row in log_prob.split("[")[1:]) <= 4, example


def test_a_loss_of_one_number_is_told_to_return_it_per_token_and_nothing_else(run):
    status, shown = run("loss", "scalar")
    assert status == 1
    assert shown.out.count("FAILED") == 1
    assert "the loss must have one number per token, (1, 1), but has shape ()" in shown.out


def test_a_loss_that_reads_masked_tokens_is_shown(run):
    status, shown = run("loss", "reads_garbage")
    assert status == 1
    assert "FAILED   masked tokens" in shown.out


def test_an_estimator_that_counts_empty_rows_is_shown(run):
    status, shown = run("advantage", "batch_mean")
    assert status == 1
    assert "FAILED   empty rows" in shown.out
    assert "token_level_rewards" in shown.out
    assert "reward_baselines" not in shown.out  # it does not read them


def test_what_the_function_raises_is_part_of_the_report(run):
    status, shown = run("loss", "raises")
    assert status == 1
    assert "it raised KeyError: 'oops'" in shown.out


def test_preference_losses_are_checked_on_pairs(run):
    status, shown = run("preference", "pair", "slope=2")
    assert status == 0
    assert shown.out.count("  ok  ") == 5
    status, shown = run("preference", "pair_mean")
    assert status == 1
    assert "FAILED   micro-batches and ranks" in shown.out
    assert "log_prob             [" in shown.out
    status, shown = run("preference", "pair_scalar")
    assert status == 1
    assert shown.out.count("FAILED") == 1
    assert "the loss must be (1,) and the rewards (1, 2), but they are () and (1, 2)" in shown.out
    status, shown = run("preference", "backwards")
    assert status == 0
    assert "warning  prefers the chosen" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss"], "expected 'loss', 'advantage' or 'preference'"),
        (["reward", "x"], "expected 'loss', 'advantage' or 'preference'"),
        (["loss", "vanila"], "did you mean 'vanilla'"),
        (["loss", "vanilla", "clip"], "expected argument=number"),
        (["loss", "vanilla", "tau=1"], "has no argument 'tau'"),
        (["loss", "vanilla", "--examples"], "--examples needs a number"),
    ],
)
def test_a_command_that_cannot_be_run_says_why(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "lockstep check loss NAME" in capsys.readouterr().out
