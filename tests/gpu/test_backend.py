"""Whole generations on the GPU: the tokens of transformers' generate in float32, memory that comes back, weights that change in place."""

import pytest
import torch
from helpers.small_pages import SMALL, stored
from helpers.tiny import tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.config.sampling import SamplingParams
from lockstep.generation.gpu.backend import GPUBackend
from lockstep.generation.gpu.fused import FusedDecoder
from lockstep.generation.pages import CacheShape, PagePool
from lockstep.generation.scheduler import Prompt, Sample, Scheduler
from lockstep.workers.rollout.request import Stopping
from lockstep.workers.rollout.sampling import request_keys

SHAPE = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "max_position_embeddings": 512}
"""Heads of 64, 4 over 2 key-value heads; sequences of several pages."""


def big_tiny(family: str, **changes):
    return tiny_model(family, **SHAPE | ({"head_dim": 64} if family in ("qwen3", "gemma2") else {}) | changes).cuda()


def make_backend(model, num_pages=200, **options):
    kv_heads = 4 if model.config.model_type == "gpt_neox" else 2
    shape = CacheShape(2, kv_heads, 64, GPUBackend.page_size, model.dtype, options.pop("kept", "auto"))
    backend = GPUBackend(model, shape, 0.5, **{"own_weights": True, "batch_invariant": False} | options)
    backend.open(num_pages)
    return backend


def generate(backend, prompts, limits, *, temperature=0.0, stop=frozenset(), seed=0, max_num_seqs=64):
    """Every prompt once for each of `limits`."""
    pool = PagePool(backend.num_pages, backend.page_size)
    scheduler = Scheduler(pool, max_num_seqs, 2048, backend.lookahead, backend.mixed)
    keys = iter(request_keys(seed, [(0, i, 0) for i in range(len(prompts) * len(limits))]).tolist())
    samples = []
    for ids in prompts:
        prompt = Prompt(list(ids))
        samples += [
            Sample(len(samples) + i, prompt, Stopping(limit, frozenset(stop), (), None), next(keys))
            for i, limit in enumerate(limits)
        ]
    scheduler.add(samples)
    sampling = SamplingParams(temperature=temperature, top_k=-1, top_p=1.0, max_tokens=max(limits), stop_token_ids=(), seed=seed)
    with torch.no_grad():
        ended = {sample.index: reason for events in backend.run(scheduler, sampling) for sample, reason in events if reason}
    assert sorted(ended) == list(range(len(samples)))
    for sample in samples:
        stopped = bool(sample.tokens) and sample.tokens[-1] in stop
        assert ended[sample.index] == ("stop" if stopped else "length")
        assert stopped or len(sample.tokens) == sample.limits.max_tokens
    assert pool.num_free == pool.capacity
    return samples, scheduler


def random_prompts(count=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 500, (n,), generator=generator).tolist() for n in (3, 64, 150, 65, 100)[:count]]


@torch.no_grad()
def greedy_of_transformers(model, sample, stop=()):
    ids = torch.tensor([sample.prompt.ids], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=sample.limits.max_tokens, do_sample=False, pad_token_id=0,
        eos_token_id=list(stop) or None,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 70}, "gemma2": {"sliding_window": 70}, "phi": {}, "gpt_neox": {},
    "mixtral": {"num_local_experts": 4}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [True, False])
def test_greedy_tokens_equal_transformers_in_float32(family, fused):
    if fused and family not in ("llama", "qwen2", "qwen3", "mistral"):
        pytest.skip("this family has no fused layers")
    changes = FAMILIES[family]
    model, reference = big_tiny(family, **changes), big_tiny(family, **changes)
    samples, _ = generate(make_backend(model, fused=fused), random_prompts(), [1, 9, 130])
    for sample in samples:
        assert sample.tokens == greedy_of_transformers(reference, sample)
        with torch.no_grad():
            ids = torch.tensor([sample.prompt.ids + sample.tokens], device="cuda")
            log_probs = reference(input_ids=ids).logits[0, len(sample.prompt.ids) - 1 : -1].log_softmax(-1)
        want = log_probs.gather(1, ids[0, len(sample.prompt.ids) :, None])[:, 0]
        assert (torch.tensor(sample.log_probs, device="cuda") - want).abs().max() < 5e-5


def test_stop_tokens_end_a_response_where_transformers_does():
    model = big_tiny("qwen2")
    backend = make_backend(model)
    free, _ = generate(backend, random_prompts(), [60])
    stop = {free[0].tokens[20], free[1].tokens[3], free[2].tokens[40]}
    samples, _ = generate(backend, random_prompts(), [60], stop=stop)
    reference = big_tiny("qwen2")
    assert [s.tokens for s in samples] == [greedy_of_transformers(reference, s, stop) for s in samples]
    assert any(len(s.tokens) < 60 for s in samples)


def test_a_short_pool_preempts_and_gives_the_same_tokens():
    model = big_tiny("qwen2")
    plenty, scheduler = generate(make_backend(model), random_prompts(), [100, 90, 120])
    assert scheduler.num_preemptions == 0
    short, scheduler = generate(make_backend(model, num_pages=14), random_prompts(), [100, 90, 120])
    assert scheduler.num_preemptions > 0
    assert [s.tokens for s in short] == [s.tokens for s in plenty]


def test_sampled_tokens_do_not_depend_on_the_batch():
    model = big_tiny("qwen2")
    backend = make_backend(model)
    together, _ = generate(backend, random_prompts(), [40], temperature=1.0, seed=3)
    alone, _ = generate(backend, random_prompts(1), [40], temperature=1.0, seed=3)
    assert alone[0].tokens == together[0].tokens
    other, _ = generate(backend, random_prompts(), [40], temperature=1.0, seed=4)
    assert [s.tokens for s in other] != [s.tokens for s in together]


def test_graphs_see_parameters_that_change_in_place_and_parameters_that_move():
    model = big_tiny("qwen2")
    backend = make_backend(model)
    first, _ = generate(backend, random_prompts(), [30])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    second, _ = generate(backend, random_prompts(), [30])
    assert [s.tokens for s in second] != [s.tokens for s in first]
    assert [s.tokens for s in second] == [greedy_of_transformers(model, s) for s in second]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    moved, _ = generate(backend, random_prompts(), [30])
    assert [s.tokens for s in moved] == [s.tokens for s in second]


def test_fifty_rounds_of_sleeping_and_waking_leave_no_memory_behind():
    model = big_tiny("qwen2")
    backend = make_backend(model)
    backend.close()
    used = []
    for _ in range(50):
        backend.open(500)
        generate(backend, random_prompts(2), [12])
        backend.close()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[-1] == used[2]


def test_logits_that_are_not_finite_end_their_sample_alone():
    model = big_tiny("qwen2", tie_word_embeddings=False)
    backend = make_backend(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = torch.nan
    prompts = [[5, 6, 7], [5, 3, 7], [8, 9]]
    pool = PagePool(backend.num_pages, backend.page_size)
    scheduler = Scheduler(pool, 64, 2048, backend.lookahead, backend.mixed)
    scheduler.add([Sample(i, Prompt(ids), Stopping(5, frozenset(), (), None), key=i) for i, ids in enumerate(prompts)])
    sampling = SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=5, stop_token_ids=(), seed=0)
    with torch.no_grad():
        reasons = {sample.index: reason for events in backend.run(scheduler, sampling) for sample, reason in events}
    assert reasons == {0: "length", 1: "error", 2: "length"}


def test_samples_of_a_prompt_read_its_pages_together_in_large_batches():
    """300 rows of 2 KV heads need no splits, so shared prefixes are used; greedy samples of a prompt must then all be alike."""
    backend = make_backend(big_tiny("qwen2"), num_pages=3000)
    prompts = random_prompts()
    many, _ = generate(backend, prompts, [40] * 60, max_num_seqs=300)
    assert any(shared for _, _, shared, _, _ in backend._workspace.runner._graphs)
    few, _ = generate(backend, prompts, [40])
    assert [s.tokens for s in many] == [few[i // 60].tokens for i in range(300)]


def test_more_requests_than_rows_are_served_as_rows_get_free():
    backend = make_backend(big_tiny("qwen2"))
    limits = [3, 30, 17, 9]
    narrow, _ = generate(backend, random_prompts(), limits, max_num_seqs=7)
    wide, _ = generate(backend, random_prompts(), limits)
    assert [s.tokens for s in narrow] == [s.tokens for s in wide]


def test_batch_invariant_log_probs_are_bitwise_the_same_in_any_batch():
    backend = make_backend(big_tiny("qwen2").bfloat16(), batch_invariant=True)
    together, _ = generate(backend, random_prompts(), [40, 20, 30], temperature=1.0, seed=3)
    alone, _ = generate(backend, random_prompts(1), [40], temperature=1.0, seed=3)
    assert alone[0].tokens == together[0].tokens
    assert alone[0].log_probs == together[0].log_probs


@pytest.mark.parametrize(("num_pages", "seats"), [(14, 64), (200, 5), (14, 2)])
def test_batch_invariant_log_probs_do_not_know_a_short_pool_or_few_rows(num_pages, seats):
    """Where few samples fit at a time, or samples have to wait for a row. The batch that is computed has 64 rows in every case."""
    model = big_tiny("qwen2").bfloat16()
    plenty, _ = generate(make_backend(model, batch_invariant=True), random_prompts(), [100, 90, 120], temperature=1.0)
    short = make_backend(model, num_pages=num_pages, batch_invariant=True)
    short._workspace_for(short._cache, 64, 8, False)
    found, scheduler = generate(short, random_prompts(), [100, 90, 120], temperature=1.0, max_num_seqs=seats)
    assert scheduler.num_preemptions == 0
    assert [s.tokens for s in found] == [s.tokens for s in plenty]
    assert [s.log_probs for s in found] == [s.log_probs for s in plenty]


@torch.no_grad()
def log_probs_of(model, sample):
    ids = torch.tensor([sample.prompt.ids + sample.tokens], device="cuda")
    start = len(sample.prompt.ids)
    return model(input_ids=ids).logits[0, start - 1 : -1].float().log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rows", [1, 3, 60])
def test_fused_layers_in_bfloat16_are_as_near_to_float32_as_the_module_itself(family, rows):
    """Few rows and many take different products, in decoding and (1 row) in prefill; all stay within 1.5 times the module's own mean
    rounding error."""
    plain, fused = big_tiny(family).bfloat16(), big_tiny(family).bfloat16()
    exact = big_tiny(family)
    exact.load_state_dict(plain.state_dict())
    prompts = [[ids[0] + i, *ids[1:20]] for i in range(12) for ids in random_prompts()]
    samples, _ = generate(
        make_backend(fused), [[i % 500 for i in ids] for ids in prompts[:rows]], [20 if rows > 1 else 300], temperature=1.0
    )
    want = torch.cat([log_probs_of(exact, s) for s in samples])
    module = torch.cat([log_probs_of(plain, s) for s in samples])
    sampler = torch.cat([torch.tensor(s.log_probs, device="cuda") for s in samples])
    assert (sampler - want).abs().mean() < 1.5 * (module - want).abs().mean()


def test_a_step_that_cannot_be_captured_is_computed_without_graphs(capsys):
    model = big_tiny("qwen2")
    want, _ = generate(make_backend(big_tiny("qwen2")), random_prompts(), [30])
    backend = make_backend(model)
    logits_of = FusedDecoder.logits

    def looks_at_the_device(self, hidden):
        assert float(hidden.sum()) < 1e9  # a copy to the host, which a capture forbids
        return logits_of(self, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDecoder, "logits", looks_at_the_device)
        slow, _ = generate(backend, random_prompts(), [30])
    assert [s.tokens for s in slow] == [s.tokens for s in want]
    assert "without CUDA graphs" in capsys.readouterr().out
    torch.cuda.manual_seed(0)
    drawn = torch.randn(3, device="cuda")  # a broken capture must not take the process's random generator with it
    torch.cuda.manual_seed(0)
    assert torch.equal(torch.randn(3, device="cuda"), drawn)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_experts_in_half_precision_are_decoded_in_graphs(family, capsys):
    """float32 experts are multiplied one by one, by counts that the host reads; bfloat16 ones by one grouped kernel."""
    backend = make_backend(big_tiny(family, **FAMILIES[family]).bfloat16())
    generate(backend, random_prompts(), [30])
    assert backend._workspace.runner._graphs
    assert "without CUDA graphs" not in capsys.readouterr().out


def test_graphs_that_are_captured_ahead_give_the_same_tokens():
    """One at a time, in the order in which they are wanted, and only of what is compiled."""
    backend = make_backend(big_tiny("qwen2"))
    want, _ = generate(backend, random_prompts(), [30])
    runner = backend._workspace.runner
    runner.forget()
    kinds = [(size, None, False, False, False) for size in (64, 16, 8, 48)]
    runner.warm_up(kinds[1:3])
    found = []
    for _ in range(3):
        with torch.no_grad():  # as in a generation
            runner.prepare(kinds)
        found.append(list(runner._graphs))
    assert found == [kinds[:1], kinds[:2], kinds[:3]]  # the largest batch is always compiled
    again, _ = generate(backend, random_prompts(), [30])
    assert [s.tokens for s in again] == [s.tokens for s in want]
    assert list(runner._graphs) == kinds[:3]


class RoundedAttention:
    """Inside, transformers' attention of the model sees keys and values as pages of fewer bits have them."""

    def __init__(self, model, kept):
        self._model, self._kept = model, kept

    def __enter__(self):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def attend(module, query, key, value, *args, **kwargs):
            key, value = (heads.to(query.dtype) for heads in stored(key, value, self._kept))
            return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

        AttentionInterface.register("small_pages_test", attend)
        AttentionMaskInterface.register("small_pages_test", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        self._model.set_attn_implementation("small_pages_test")
        return self._model

    def __exit__(self, *error):
        self._model.set_attn_implementation("sdpa")


def gap(model, samples):
    """Mean |log-prob of the sampler - of the model|."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt.ids + sample.tokens], device="cuda")
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, len(sample.prompt.ids) - 1 : -1].float().log_softmax(-1)
        want = log_probs.gather(1, ids[0, len(sample.prompt.ids) :, None])[:, 0]
        found.append((torch.tensor(sample.log_probs, device="cuda") - want).abs())
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_pages", [200, 14])
@pytest.mark.parametrize("kept", SMALL)
def test_keys_and_values_of_fewer_bits_are_those_of_transformers_rounded(family, num_pages, kept):
    """With preemptions where pages are few. In float32, in which hardly a number falls on the other side of a rounding: where transformers
    rounds keys and values too, less than a tenth of what they take away is left. What bfloat16 and these differ by is printed."""
    told = []
    for dtype, small in ((torch.bfloat16, "auto"), (torch.bfloat16, kept), (torch.float32, kept)):
        model, reference = big_tiny(family).to(dtype), big_tiny(family).to(dtype).float()
        backend = make_backend(model, num_pages=num_pages, kept=small)
        samples, scheduler = generate(backend, random_prompts(), [1, 9, 130], temperature=1.0)
        backend.close()
        assert (scheduler.num_preemptions > 0) == (num_pages < 20)
        plain = gap(reference, samples)
        with RoundedAttention(reference, kept):
            rounded_too = gap(reference, samples)
        told.append(f"{dtype}, keys {small}: {plain:.5f}, with both rounded {rounded_too:.5f}")
    print(f"{family}, {num_pages} pages, mean |sampler - float32 log-prob|: " + "; ".join(told))
    assert rounded_too < 0.1 * plain
