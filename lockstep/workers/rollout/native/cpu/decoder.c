// All layers of a pass: the functions of this folder one after another. Between them is no way back to Python, which takes longer than
// what it calls where a pass has few tokens.
#include <stdint.h>

void linear(const float *x, const char *panels, const float *bias, float *out, int64_t x_stride, int64_t out_stride, int64_t rows,
            int64_t depth, int64_t columns, int64_t half, int64_t mode, int64_t threads);
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps, int64_t threads);
void rotate(float *x, const float *cos, const float *sin, const int64_t *positions, const float *q_norm, const float *k_norm,
            int64_t stride, int64_t tokens, int64_t heads, int64_t query_heads, int64_t dim, float eps, int64_t threads);
void store_keys_values(const float *keys, const float *values, const int64_t *slots, void *k, void *v, int64_t stride, int64_t tokens,
                       int64_t kv_heads, int64_t dim, int64_t half, int64_t threads);
void attention(const float *q, const void *k, const void *v, const int32_t *table, const int32_t *blocks, float *out, const float *sinks,
               int64_t q_stride, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t width, int64_t window, int64_t half,
               float scale, float softcap, int64_t threads);

enum { STORE, ADD, GATED };  // as in linear.c

// What a layer is made of: addresses, in the order of whole.py.
typedef struct {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    const char *qkv, *out, *gate_up, *down;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    void *keys, *values;
    int64_t qkv_half, out_half, gate_up_half, down_half;  // whether the weights are bfloat16
    int64_t window;
} layer;

// hidden: [tokens, size], float32, in place; scratch: [tokens, size + (heads + 2 kv_heads) dim + heads dim + inner]. half: of the pages.
// The others are as in the functions above.
void decoder_layers(float *hidden, const layer *layers, const float *cos, const float *sin, const int64_t *positions,
                    const int64_t *slots, const int32_t *table, const int32_t *blocks, float *scratch, int64_t count, int64_t tokens,
                    int64_t num_blocks, int64_t width, int64_t size, int64_t inner, int64_t heads, int64_t kv_heads, int64_t dim,
                    int64_t half_pages, float scale, float eps, int64_t threads) {
    const int64_t all = (heads + 2 * kv_heads) * dim, seen_size = heads * dim;
    float *x = scratch, *qkv = x + tokens * size, *seen = qkv + tokens * all, *gated = seen + tokens * seen_size;
    for (const layer *l = layers; l < layers + count; l++) {
        rms_norm(hidden, l->input_norm, x, tokens, size, eps, threads);
        linear(x, l->qkv, l->qkv_bias, qkv, size, all, tokens, size, all, l->qkv_half, STORE, threads);
        rotate(qkv, cos, sin, positions, l->q_norm, l->k_norm, all, tokens, heads + kv_heads, heads, dim, eps, threads);
        const float *keys = qkv + seen_size, *values = keys + kv_heads * dim;
        store_keys_values(keys, values, slots, l->keys, l->values, all, tokens, kv_heads, dim, half_pages, threads);
        attention(qkv, l->keys, l->values, table, blocks, seen, 0, all, num_blocks, heads, kv_heads, dim, width, l->window, half_pages, scale,
                  0.0f, threads);
        linear(seen, l->out, l->out_bias, hidden, seen_size, size, tokens, seen_size, size, l->out_half, ADD, threads);
        rms_norm(hidden, l->mlp_norm, x, tokens, size, eps, threads);
        linear(x, l->gate_up, l->gate_up_bias, gated, size, inner, tokens, size, inner, l->gate_up_half, GATED, threads);
        linear(gated, l->down, l->down_bias, hidden, inner, size, tokens, inner, size, l->down_half, ADD, threads);
    }
}
