"""Against plain PyTorch: Hugging Face's own attention, row by row, formulas written out, autograd."""

import dataclasses
import math

import pytest
import torch
from helpers.tiny import save_tiny_model

from lockstep.config.load import with_changes
from lockstep.errors import ConfigError, DataError
from lockstep.protocol import DataProto, Ragged
from lockstep.tools.compare import measure as measure_module
from lockstep.tools.compare.algorithms import LOSS_KWARGS, Algorithm, own_changes, read_algorithm, read_algorithms
from lockstep.tools.compare.measure import compare

AGG = "actor_rollout_ref.actor.loss_agg_mode"
CLIP, DUAL, TEMPERATURE, ENTROPY, KL = 0.2, 3.0, 1.3, 0.05, 0.1


def plain_log_probs(path, batch):
    """The model, and for each row the log-probs of its response and the entropy there, with their graph."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    log_probs, entropies = [], []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        all_log_probs = logits.log_softmax(-1)
        log_probs.append(all_log_probs.gather(1, response[:, None])[:, 0])
        entropies.append(-(all_log_probs.exp() * all_log_probs).sum(-1))
    return model, log_probs, entropies


def plain_loss(name, batch, log_probs, entropies):
    """GRPO and RLOO written out token by token, with the entropy bonus and the KL loss, over the tokens of the mask."""
    columns = {n: batch.ragged(n).rows() for n in ("response_mask", "old_log_probs", "ref_log_prob", "token_level_scores")}
    scores = [rows.sum().item() for rows in columns["token_level_scores"]]
    total = torch.zeros(())
    for i, row in enumerate(log_probs):
        other = scores[i + 1 if i % 2 == 0 else i - 1]
        advantage = scores[i] - other
        if name == "grpo":  # half the distance over the deviation of two
            advantage = (advantage / 2) / (abs(advantage) / math.sqrt(2) + 1e-6)
        count, tokens = 0, torch.zeros(())
        for t in range(len(row)):
            if not columns["response_mask"][i][t]:
                continue
            count += 1
            ratio = (row[t] - columns["old_log_probs"][i][t]).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            if advantage < 0:
                loss = torch.minimum(loss, torch.tensor(-advantage * DUAL))
            kl = 0.5 * (row[t] - columns["ref_log_prob"][i][t]).square()
            tokens = tokens + loss - ENTROPY * entropies[i][t] + KL * kl
        total = total + (tokens / count if name == "grpo" else tokens) / len(log_probs)
    return total


def plain(name, path, batch):
    """Flat gradient, and the gradient by each log-prob [rows of tensors]."""
    model, log_probs, entropies = plain_log_probs(path, batch)
    # The entropy is another function of the logits: it moves the weights, but it is no push on a log-prob.
    leaves = [row.detach().requires_grad_() for row in log_probs]
    by_log_prob = torch.autograd.grad(plain_loss(name, batch, leaves, [e.detach() for e in entropies]), leaves)
    plain_loss(name, batch, log_probs, entropies).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), by_log_prob


def named(*names):
    return [read_algorithm(name) for name in names]


def test_norms_cosines_and_pushes_are_those_of_plain_pytorch(recording, tiny_path):
    found = compare(recording, named("grpo", "rloo"), num_tokens=6)
    (g, g_pushes), (r, r_pushes) = (plain(name, tiny_path, recording.batch) for name in ("grpo", "rloo"))
    assert [result.grad_norm for result in found.results] == pytest.approx([g.norm().item(), r.norm().item()], rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(g, r, dim=0).item()
    assert cosine < 0.995  # so that a matrix of ones would be wrong
    assert found.cosines[0][1] == pytest.approx(cosine, abs=1e-5)
    assert found.cosines[0][1] == found.cosines[1][0]
    for result, pushes in zip(found.results, (g_pushes, r_pushes), strict=True):
        assert result.row_pushes == pytest.approx([-row.sum().item() for row in pushes], rel=1e-4, abs=1e-7)
        shown = [*result.pushed_up, *result.pushed_down]
        assert len(shown) > 4
        for token in shown:
            assert token.push == pytest.approx(-pushes[token.row][token.position].item(), rel=1e-4)
        whole = torch.cat(pushes)
        mask = recording.batch.ragged("response_mask").values.bool()
        assert result.largest_push == pytest.approx(whole.abs().max().item(), rel=1e-4)
        assert result.silent_fraction == pytest.approx((whole == 0).float().mean().item())
        kish = whole[mask].abs().sum() ** 2 / whole[mask].square().sum() / mask.sum()
        assert result.push_effective == pytest.approx(kish.item(), rel=1e-4)
        assert result.masked_fraction == pytest.approx(2 / 21)


def test_ratios_and_clips_are_those_of_the_policy_and_the_batch(recording, tiny_path):
    found = compare(recording, named("grpo", "cispo"))
    with torch.no_grad():
        _, log_probs, _ = plain_log_probs(tiny_path, recording.batch)
    mask = recording.batch.ragged("response_mask").values.bool()
    ratio = (torch.cat(log_probs) - recording.batch.ragged("old_log_probs").values)[mask].exp()
    outside = (ratio > 1 + CLIP).float().mean().item()  # named cispo has no lower end
    assert 0 < outside < 1
    assert found.results[1].clip_fraction == pytest.approx(outside)
    assert found.results[0].ratio_effective == pytest.approx(
        (ratio.sum() ** 2 / ratio.square().sum() / len(ratio)).item(), rel=1e-5
    )
    assert found.source["largest_log_ratio"] == pytest.approx(ratio.log().abs().max().item(), rel=1e-4)


def test_equal_algorithms_are_parallel_and_scores_scale_the_gradient_only(recording):
    only = {"actor_rollout_ref.actor.entropy_coeff": 0.0, "actor_rollout_ref.actor.use_kl_loss": False}
    names = named("rloo", "rloo", "grpo")
    once = compare(recording, names, changes=only)
    assert once.cosines[0][1] == pytest.approx(1, abs=1e-12)
    scores = recording.batch.ragged("token_level_scores")
    batch = recording.batch.select()
    batch.set("token_level_scores", scores.like(3 * scores.values))
    thrice = compare(dataclasses.replace(recording, batch=batch), names, changes=only)
    assert thrice.results[0].grad_norm == pytest.approx(3 * once.results[0].grad_norm, rel=1e-5)
    assert thrice.results[2].grad_norm == pytest.approx(once.results[2].grad_norm, rel=1e-4)  # grpo divides by the deviation
    assert thrice.cosines[0][2] == pytest.approx(once.cosines[0][2], abs=1e-5)


def test_micro_batches_change_nothing(recording):
    def run(size):
        return compare(recording, named("gspo", "dapo"), changes={"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": size})

    one, all_at_once = run(1), run(6)
    for a, b in zip(one.results, all_at_once.results, strict=True):
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert a.row_pushes == pytest.approx(b.row_pushes, rel=1e-4, abs=1e-7)


def test_changes_for_all_win_over_those_of_an_algorithm(recording):
    found = compare(recording, named("grpo", "dapo"), changes={AGG: "token-mean", "actor_rollout_ref.actor.clip_ratio_high": 0.2})
    assert found.cosines[0][1] == pytest.approx(1, abs=1e-12)


def test_a_drift_is_one_optimizer_step_of_the_first_algorithm_that_works(recording):
    names = named("ppo", "grpo", "cispo")
    still, moved = compare(recording, names), compare(recording, names, drift=1e-3)
    assert moved.source["drift_algorithm"] == "grpo"  # ppo has no values here
    assert still.source["drift_algorithm"] is None
    norms = [[result.grad_norm for result in found.results] for found in (still, moved)]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_another_model_is_the_policy_that_would_be_updated(recording, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=3)
    found = compare(recording, named("grpo", "rloo"), model=tmp_path / "other")
    expected, _ = plain("grpo", other, recording.batch)
    assert found.results[0].grad_norm == pytest.approx(expected.norm().item(), rel=1e-5)


def test_what_the_batch_cannot_give_is_listed_with_what_records_it(recording):
    batch = recording.batch.select()
    del batch.columns["ref_log_prob"]
    kl = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True}
    plain_config = with_changes(recording.config, {"actor_rollout_ref.actor.use_kl_loss": False})
    names = [*named("ppo", "remax", "gdpo"), Algorithm("with_kl", kl), *named("grpo", "rloo")]
    found = compare(dataclasses.replace(recording, batch=batch, config=plain_config), names)
    reasons = dict(found.not_comparable)
    assert [result.name for result in found.results] == ["grpo", "rloo"]
    assert "critic.enable=true" in reasons["ppo"]
    assert "reward_baselines" in reasons["remax"]
    assert "gdpo_reward_keys" in reasons["gdpo"]
    assert "ref_log_prob" in reasons["with_kl"]


def test_one_algorithm_alone_is_no_comparison_and_is_refused_before_a_policy_is_loaded(recording, monkeypatch):
    monkeypatch.setattr(measure_module, "loaded_policy", None)  # calling it is a TypeError
    with pytest.raises(ConfigError, match="needs two\n  ppo: .*values"):
        compare(recording, named("ppo", "grpo"))


SCALED = """
def scaled(*, log_prob, old_log_prob, advantages, response_mask, rows, sharpness):
    ratio = (log_prob - old_log_prob).where(response_mask > 0, 0).exp()
    return -advantages.where(response_mask > 0, 0) * ratio * sharpness, {}
"""


def test_arguments_of_a_loss_are_its_own_and_can_be_given_behind_a_name(recording, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SCALED)
    loss, kwargs = "actor_rollout_ref.actor.policy_loss.loss_mode", LOSS_KWARGS
    own = dataclasses.replace(
        recording, config=with_changes(recording.config, {loss: f"{file}:scaled", kwargs: {"sharpness": 1.0}})
    )
    words = ["grpo", "gspo", f"{file}:scaled+grpo", f"{file}:scaled+grpo", "loss_kwargs={sharpness: 3.0}"]
    found = compare(own, read_algorithms(words))
    assert [result.name for result in found.results] == ["grpo", "gspo", "scaled+grpo", "scaled+grpo"]
    assert found.not_comparable == []
    once, thrice = found.results[2:]
    # the recorded run's entropy bonus and KL loss are not scaled
    assert thrice.largest_push != pytest.approx(once.largest_push)
    assert own_changes(read_algorithm("grpo"), own.config)[kwargs] == {}
    cleared = compare(own, read_algorithms(["grpo", "rloo", f"{file}:scaled+grpo"]), changes={kwargs: {}})
    assert [name for name, _ in cleared.not_comparable] == ["scaled+grpo"]


def test_arguments_before_any_name_are_an_error():
    with pytest.raises(ConfigError, match="before the first algorithm"):
        read_algorithms(["loss_kwargs={a: 1}", "grpo"])


def test_rejection_is_seen_as_masked_tokens(recording):
    batch = recording.batch.select()
    rollout = batch.ragged("old_log_probs").values.clone()
    rollout[3] -= 5.0
    batch.set("rollout_log_probs", batch.ragged("old_log_probs").like(rollout))
    section = "algorithm.rollout_correction"
    strict = Algorithm("strict", {f"{section}.rollout_rs": "token_k1", f"{section}.rollout_rs_threshold": 2.0})
    found = compare(
        dataclasses.replace(recording, batch=batch), [strict, *named("grpo")], changes={"algorithm.adv_estimator": "grpo"}
    )
    assert [result.masked_fraction for result in found.results] == pytest.approx([3 / 21, 2 / 21])


def test_a_model_that_does_not_know_the_tokens_is_an_error(recording):
    strange = recording.batch.select()
    responses = strange.ragged("responses")
    strange.set("responses", responses.like(responses.values + 40))
    with pytest.raises(DataError, match="knows only 0 to 31"):
        compare(dataclasses.replace(recording, batch=DataProto(strange.columns, strange.non_tensor_batch)), named("grpo", "rloo"))


def test_excerpts_show_every_algorithm_on_the_same_tokens(recording):
    found = compare(recording, named("grpo", "rloo"), num_excerpts=2)
    assert len(found.excerpts) == 2
    for excerpt in found.excerpts:
        length = int(recording.batch.ragged("responses").lengths[excerpt.row])
        assert len(excerpt.tokens) == length
        for result, pushes in zip(found.results, excerpt.pushes, strict=True):
            assert sum(pushes) == pytest.approx(result.row_pushes[excerpt.row], rel=1e-5, abs=1e-7)


def test_a_missing_baseline_leaves_rows_out_of_what_reads_baselines_alone(recording):
    found = {}
    for name, first in (("missing", math.nan), ("known", 0.25)):
        batch = recording.batch.select()
        batch.set("reward_baselines", torch.tensor([first, first, 0.1, 0.1, 0.2, 0.2]))
        found[name] = compare(dataclasses.replace(recording, batch=batch), named("remax", "rloo")).results
    (remax, rloo), (whole, same) = found["missing"], found["known"]
    assert remax.row_pushes[:2] == [0.0, 0.0]
    assert 0.0 not in whole.row_pushes[:2]
    assert (remax.masked_fraction, whole.masked_fraction) == pytest.approx((8 / 21, 2 / 21))
    assert rloo.row_pushes == same.row_pushes


def gradients(count=3):
    generator = torch.Generator().manual_seed(0)
    return [{"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(count)]


def ragged(block):
    """Rows of all their columns, and one more row without tokens."""
    return Ragged.from_rows([*block, []], dtype=block.dtype)


def flat(gradient):
    return torch.cat([tensor.flatten() for tensor in gradient.values()]).double()


def test_cosines_are_those_of_the_flattened_gradients():
    several = gradients()
    expected = torch.nn.functional.normalize(torch.stack([flat(g) for g in several]), dim=1)
    found = measure_module.cosines(measure_module.dots(several))
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected @ expected.T, rtol=0, atol=1e-12)


def test_a_gradient_of_zero_has_no_direction():
    one, two = gradients(2)
    zero = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
    (a, b, none), *_, last = measure_module.cosines(measure_module.dots([one, two, zero]))
    assert a == pytest.approx(1)
    assert b is not None
    assert none is None
    assert last == [None, None, None]


def test_gradients_of_different_parameters_are_not_compared():
    one, two = gradients(2)
    with pytest.raises(ValueError, match="'c'"):
        measure_module.dot(one, {"a": two["a"], "c": two["b"]})


@pytest.mark.parametrize(
    ("weights", "share"), [([2.0, 2, 2, 2], 1.0), ([0.0, 5, 0, 0], 0.25), ([1.0, 3], 16 / 20), ([0.0, 0], None)]
)
def test_the_effective_share_is_that_of_kish(weights, share):
    assert measure_module.effective_share(torch.tensor(weights)) == (share if share is None else pytest.approx(share))
    assert measure_module.effective_share(7 * torch.tensor(weights)) == (share if share is None else pytest.approx(share))


def test_the_strongest_are_the_peaks_of_the_rows_in_order():
    pushes = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    pushes[4] = 0.0
    for sign, found in zip((1, -1), measure_module.strongest(ragged(pushes), 4), strict=True):
        peaks = sorted(((sign * pushes[r]).max().item(), -r) for r in range(9))[::-1]
        expected = [(-r, int((sign * pushes[-r]).argmax())) for value, r in peaks if value > 0][:4]
        assert found == expected
    assert measure_module.strongest(ragged(torch.zeros(2, 3)), 4) == ([], [])


def test_windows_are_in_different_rows_and_serve_each_algorithm_in_turn():
    first, second = torch.zeros(4, 3), torch.zeros(4, 3)
    first[0, 2], first[1, 0] = -9.0, 1.0
    second[3, 1], second[0, 0] = 0.1, -0.05
    assert measure_module.windows([ragged(first), ragged(second)], 4) == [(0, 2), (3, 1), (1, 0)]
    assert measure_module.windows([ragged(first), ragged(second)], 2) == [(0, 2), (3, 1)]
    assert measure_module.windows([ragged(torch.zeros(4, 3))], 2) == []
