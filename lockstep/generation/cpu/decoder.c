// All layers of a pass, and its logits: the functions of this folder one after another, by one team of threads. Between them is no way back
// to Python, which takes longer than what it calls where a pass has few tokens, and no thread is started or put to sleep.
#include "linear.h"
#include "team.h"

void rms_norm_share(const float *x, const float *weight, void *out, int64_t rows, int64_t size, float eps, int64_t half);
void rotate_share(float *x, const float *cos, const float *sin, const int64_t *positions, const float *q_norm, const float *k_norm,
                  int64_t stride, int64_t tokens, int64_t heads, int64_t query_heads, int64_t dim, float eps);
void store_share(const float *keys, const float *values, const int64_t *slots, void *k, void *v, int64_t stride, int64_t tokens,
                 int64_t kv_heads, int64_t dim, int64_t half);
void attention_share(const float *q, const void *k, const void *v, const int32_t *table, const int32_t *blocks, void *out,
                     const float *sinks, int64_t q_stride, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t width,
                     int64_t window, int64_t half, float scale, float softcap, int64_t to_half);

// What a layer is made of: addresses, in the order of fused_backend.py.
typedef struct {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    product qkv, out, gate_up, down;
    void *keys, *values;
    int64_t window;
} layer;

// Rows `wanted`, ascending, become the first of x; a row has `bytes`.
static void gather(void *x, const int64_t *wanted, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) memmove((char *)x + i * bytes, (char *)x + wanted[i] * bytes, bytes);
}

// hidden: [tokens, size], float32, in place; scratch: [tokens, size + (heads + 2 kv_heads) dim + heads dim + inner]. half: of the pages.
// Of the last layer only the keys and values of every token are needed; its result is computed for the tokens `wanted` [num_wanted],
// ascending, and is in the first rows of hidden. `last_blocks` are theirs, if they are not all. logits: [num_wanted, columns of `head`], of
// these rows normalised by `norm`. The others are as in the functions above.
void decoder_layers(float *hidden, const layer *layers, const float *norm, const product *head, float *logits, const float *cos,
                    const float *sin, const int64_t *positions, const int64_t *slots, const int32_t *table, const int32_t *blocks,
                    const int64_t *wanted, const int32_t *last_blocks, float *scratch, int64_t count, int64_t tokens,
                    int64_t num_blocks, int64_t num_wanted, int64_t width, int64_t size, int64_t inner, int64_t heads, int64_t kv_heads,
                    int64_t dim, int64_t half_pages, float scale, float eps, int64_t threads) {
    const int64_t all = (heads + 2 * kv_heads) * dim, seen_size = heads * dim;
    float *x = scratch, *qkv = x + tokens * size, *seen = qkv + tokens * all, *gated = seen + tokens * seen_size;
    const float *keys = qkv + seen_size, *values = keys + kv_heads * dim;
    meeting all_here = {0, 0};
#pragma omp parallel num_threads(threads)
    {
        for (const layer *l = layers; l < layers + count; l++) {
            const int cut = l + 1 == layers + count && num_wanted < tokens;
            const int64_t rows = cut ? num_wanted : tokens;
            const product *next = l + 1 < layers + count ? &l[1].qkv : head;
            // What a product takes is written as its panels want it.
            rms_norm_share(hidden, l->input_norm, x, tokens, size, eps, l->qkv.kind == PAIRS);
            meet(&all_here);
            linear_share(x, &l->qkv, qkv, size, all, tokens, 0, &l->out);
            meet(&all_here);
            rotate_share(qkv, cos, sin, positions, l->q_norm, l->k_norm, all, tokens, heads + kv_heads, heads, dim, eps);
            store_share(keys, values, slots, l->keys, l->values, all, tokens, kv_heads, dim, half_pages);  // of the tokens that it rotated
            meet(&all_here);
            attention_share(qkv, l->keys, l->values, table, cut ? last_blocks : blocks, seen, 0, all, cut ? num_wanted : num_blocks, heads,
                            kv_heads, dim, width, l->window, half_pages, scale, 0.0f, l->out.kind == PAIRS);
            meet(&all_here);
            if (cut) {
                if (team_number() == 0)
                    gather(hidden, wanted, rows, size * 4), gather(seen, wanted, rows, seen_size * (l->out.kind == PAIRS ? 2 : 4));
                meet(&all_here);
            }
            linear_share(seen, &l->out, hidden, seen_size, size, rows, 0, &l->gate_up);
            meet(&all_here);
            rms_norm_share(hidden, l->mlp_norm, x, rows, size, eps, l->gate_up.kind == PAIRS);
            meet(&all_here);
            linear_share(x, &l->gate_up, gated, size, inner, rows, l->down.kind == PAIRS, &l->down);
            meet(&all_here);
            linear_share(gated, &l->down, hidden, inner, size, rows, 0, next);
            meet(&all_here);
        }
        rms_norm_share(hidden, norm, x, num_wanted, size, eps, head->kind == PAIRS);
        meet(&all_here);
        linear_share(x, head, logits, size, head->columns, num_wanted, 0, &layers->qkv);
    }
}
