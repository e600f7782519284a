// Attention over pages, read in place: tokens of any number of sequences, in prompts or decoding.
//
// Keys of a page lie [kv_heads, dim, PAGE], so that the scores of neighbouring keys are computed side by side; values [kv_heads, PAGE, dim].
// A few neighbouring tokens of one sequence are computed together (a block), with all the query heads that share a key head: each key and
// value is read once for all of them. Softmax has a running maximum over stretches of KEYS keys. While keys are read, the values at the
// same places are fetched from memory, and while values are read, the keys that come next: pages lie anywhere, so nothing else would.
// The sums of one token and head go over dimensions and keys in their order, whatever else is in the block or the batch: it has the same
// bits anywhere.
#include "team.h"
#include "vectors.h"

#define PAGE 16
#define KEYS 64                // keys between two corrections of the running maximum
#define ROWS (TILE_ROWS / 2)   // queries whose sums are in registers at once, with 4 vectors each

int page_tokens(void) { return PAGE; }

INLINE void fetch(const void *memory, int64_t i, const int half) { __builtin_prefetch((const char *)memory + i * (half ? 2 : 4), 0, 3); }

// out [rows, KEYS] at 4 vectors of keys: q [rows, dim] times the keys at `at`. The values `v` there are fetched.
INLINE void score(const int rows, const int half, const float *q, int dim, const void *k, const void *v, const int64_t *at, float *out) {
    lanes sums[4 * ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < 4 * rows; i++) sums[i] = (lanes){0};
#pragma GCC unroll 1
    for (int d = 0; d < dim; d++) {
        const lanes k0 = load_either(k, at[0] + d * PAGE, half), k1 = load_either(k, at[1] + d * PAGE, half);
        const lanes k2 = load_either(k, at[2] + d * PAGE, half), k3 = load_either(k, at[3] + d * PAGE, half);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) fetch(v, at[i] + d * PAGE, half);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const float a = q[r * dim + d];
            sums[4 * r] += a * k0, sums[4 * r + 1] += a * k1, sums[4 * r + 2] += a * k2, sums[4 * r + 3] += a * k3;
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < 4 * rows; i++) store(out + i / 4 * KEYS + i % 4 * LANES, sums[i]);
}

// out [rows, dim] += weights [rows, KEYS] times the values of keys `begin` to `end`, for `vectors` vectors of the dimensions. As many of the
// keys `k` at `next` are fetched.
INLINE void mix(const int rows, const int vectors, const int half, const float *weights, const void *v, const int64_t *at, const void *k,
                const int64_t *next, int begin, int end, int dim, float *out) {
    lanes sums[4 * ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < vectors * rows; i++) sums[i] = load(out + i / vectors * dim + i % vectors * LANES);
#pragma GCC unroll 1
    for (int t = begin; t < end; t++) {
        const int64_t place = at[t / PAGE] + t % PAGE * dim, ahead = next[t / PAGE] + t % PAGE * dim;
        lanes value[4];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) value[i] = load_either(v, place + i * LANES, half), fetch(k, ahead + i * LANES, half);
#pragma GCC unroll 24
        for (int i = 0; i < vectors * rows; i++) sums[i] += weights[i / vectors * KEYS + t] * value[i % vectors];
    }
#pragma GCC unroll 24
    for (int i = 0; i < vectors * rows; i++) store(out + i / vectors * dim + i % vectors * LANES, sums[i]);
}

#if LANES == 16
#define FOR_ROWS(n, CASE) switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#else
#define FOR_ROWS(n, CASE) switch (n) { CASE(1) CASE(2) CASE(3) }
#endif

// Where the pages are that hold keys `start` to `start` + KEYS of a sequence that ends at `last`: past it, the last page again.
INLINE void places(const int32_t *pages, int64_t page, int64_t head, int64_t start, int64_t last, int64_t *at) {
    for (int i = 0; i < KEYS / PAGE; i++) at[i] = pages[(start + i * PAGE <= last ? start + i * PAGE : last) / PAGE] * page + head;
}

// The first key of the first stretch that a token at `position` sees.
INLINE int64_t first_stretch(int64_t position, int64_t window) {
    return window && position >= window ? (position - window + 1) / KEYS * KEYS : 0;
}

// How many stretches a block has: that is what it costs, in decoding to be read from memory, in a prompt to be computed.
INLINE int64_t stretches(const int32_t *block, int64_t window) {
    return (block[2] + block[1] - 1 - first_stretch(block[2], window)) / KEYS + 1;
}

// One block and one key head: queries [tokens * groups, dim], scaled; out alike. The first token is at `position` of its sequence. `after`
// are the places of what is computed after this block.
INLINE void attend(const int half, const float *queries, const void *k, const void *v, const int32_t *pages, int64_t page, int64_t head,
                   const int64_t *after, int tokens, int groups, int64_t position, int dim, int64_t window, float softcap,
                   const float *sinks, float *out) {
    const int rows = tokens * groups;
    float scores[rows][KEYS], largest[rows], total[rows];
    memset(out, 0, sizeof(float) * rows * dim);
    for (int r = 0; r < rows; r++) {
        largest[r] = sinks ? sinks[r % groups] : -INFINITY;
        total[r] = sinks ? 1.0f : 0.0f;
    }
    const int64_t last = position + tokens - 1;
    for (int64_t start = first_stretch(position, window); start <= last; start += KEYS) {
        int64_t key_at[KEYS / LANES], value_at[KEYS / PAGE], next_at[KEYS / PAGE];
        places(pages, page, head, start, last, value_at);
        if (start + KEYS <= last)
            places(pages, page, head, start + KEYS, last, next_at);
        else
            memcpy(next_at, after, sizeof next_at);
        for (int i = 0; i < KEYS / LANES; i++) key_at[i] = value_at[i * LANES / PAGE] + i * LANES % PAGE;
        for (int r = 0; r < rows; r += ROWS) {
            const int here = rows - r < ROWS ? rows - r : ROWS;
            for (int i = 0; i < KEYS / LANES; i += 4) {
#define CASE(n) case n: score(n, half, queries + r * dim, dim, k, v, key_at + i, &scores[r][i * LANES]); break;
                FOR_ROWS(here, CASE)
#undef CASE
            }
        }
        int begin = KEYS, end = 0;  // of the keys that any row sees
        for (int r = 0; r < rows; r++) {
            const int64_t own = position + r / groups;
            const int from = window && own - window + 1 > start ? own - window + 1 - start : 0;
            const int to = own + 1 - start < KEYS ? own + 1 - start : KEYS;
            if (from > 0 || to < KEYS)
                for (int t = 0; t < KEYS; t++) scores[r][t] = t < from || t >= to ? -INFINITY : scores[r][t];
            if (from >= to) {
                for (int t = 0; t < KEYS; t++) scores[r][t] = 0.0f;
                continue;
            }
            begin = from < begin ? from : begin, end = to > end ? to : end;
            if (softcap > 0.0f)
                for (int t = from; t < to; t++) scores[r][t] = softcap * tanhf(scores[r][t] / softcap);
            float most = largest[r], sum = 0.0f;
#pragma omp simd reduction(max : most)
            for (int t = 0; t < KEYS; t++) most = scores[r][t] > most ? scores[r][t] : most;
            // Without any score above -inf (or with none that is a number) there is nothing to subtract.
            const float base = most == -INFINITY ? 0.0f : most;
            const float correction = largest[r] == base || largest[r] == -INFINITY ? 1.0f : exp_negative(largest[r] - base);
#pragma omp simd reduction(+ : sum)
            for (int t = 0; t < KEYS; t++) {
                scores[r][t] = exp_negative(scores[r][t] - base);
                sum += scores[r][t];
            }
            total[r] = total[r] * correction + sum;
            largest[r] = most;
            if (correction != 1.0f)
                for (int d = 0; d < dim; d++) out[r * dim + d] *= correction;
        }
        if (tokens == 1)  // what `mix` does not fetch of the keys that come next, because this stretch is not full
            for (int t = end; t < KEYS; t++)
                for (int d = 0; d < dim; d += LANES) fetch(k, next_at[t / PAGE] + t % PAGE * dim + d, half);
        for (int r = 0; r < rows; r += ROWS) {
            const int here = rows - r < ROWS ? rows - r : ROWS;
            int d = 0;
#define CASE(n) case n: mix(n, 4, half, scores[r], (const char *)v + d * (half ? 2 : 4), value_at, k, next_at, begin, end, dim, out + r * dim + d); break;
            for (; d + 4 * LANES <= dim; d += 4 * LANES) FOR_ROWS(here, CASE)
#undef CASE
#define CASE(n) case n: mix(n, 1, half, scores[r], (const char *)v + d * (half ? 2 : 4), value_at, k, next_at, begin, end, dim, out + r * dim + d); break;
            for (; d + LANES <= dim; d += LANES) FOR_ROWS(here, CASE)
#undef CASE
            // One rounding for each product and sum, as above: left to itself the compiler makes it one or two, by the place in the loop.
            for (; d < dim; d++)
                for (int i = r; i < r + here; i++)
                    for (int t = begin; t < end; t++)
                        out[i * dim + d] = fmaf(scores[i][t], number(v, value_at[t / PAGE] + t % PAGE * dim + d, half), out[i * dim + d]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++) out[r * dim + d] /= total[r];
}

// q, out: [tokens, heads, dim], tokens q_stride and heads * dim apart; k, v: pages, float32 or (half) bfloat16; table: [sequences, width];
// blocks: [count, 4] = first token, tokens, position of the first token, sequence. window 0: none; softcap 0: none; sinks: [heads] or NULL.
// to_half: out is bfloat16.
// Functions with `share` in their name are called by every thread of a team, and wait for nobody.
void attention_share(const float *q, const void *k, const void *v, const int32_t *table, const int32_t *blocks, void *out,
                     const float *sinks, int64_t q_stride, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t width,
                     int64_t window, int64_t half, float scale, float softcap, int64_t to_half) {
    const int64_t groups = heads / kv_heads, page = kv_heads * dim * PAGE;
    int64_t total = 0, begun = 0, end;
    for (int64_t b = 0; b < count; b++) total += stretches(blocks + 4 * b, window) * kv_heads;
    // Every thread has blocks and heads that follow one another, with as many stretches as the others': it knows what it needs next.
    const int64_t begin = own_part(total, &end);
    for (int64_t b = 0; b < count; b++) {
        const int32_t *block = blocks + 4 * b, tokens = block[1];
        const int64_t own = stretches(block, window);
        for (int64_t head = 0; head < kv_heads; head++, begun += own) {
            if (begun < begin) continue;
            if (begun >= end) return;
            const int64_t following = head + 1 < kv_heads ? head + 1 : 0;
            const int32_t *next = following || b + 1 == count || begun + own >= end ? block : block + 4;
            int64_t after[KEYS / PAGE];
            places(table + next[3] * width, page, following * dim * PAGE, first_stretch(next[2], window), next[2] + next[1] - 1, after);
            float queries[tokens * groups * dim], result[tokens * groups * dim];
            for (int t = 0; t < tokens; t++)
                for (int64_t d = 0; d < groups * dim; d++)
                    queries[t * groups * dim + d] = q[(block[0] + t) * q_stride + head * groups * dim + d] * scale;
#define ATTEND(kind) \
    attend(kind, queries, k, v, table + block[3] * width, page, head * dim * PAGE, after, tokens, groups, block[2], dim, window, softcap, \
           sinks ? sinks + head * groups : 0, result)
            if (half)
                ATTEND(1);
            else
                ATTEND(0);
#undef ATTEND
            for (int t = 0; t < tokens; t++) {
                const int64_t to = ((block[0] + t) * heads + head * groups) * dim;
                if (to_half)
                    for (int64_t d = 0; d < groups * dim; d++) put(out, to + d, result[t * groups * dim + d], 1);
                else
                    memcpy((float *)out + to, result + t * groups * dim, sizeof(float) * groups * dim);
            }
        }
    }
}

void attention(const float *q, const void *k, const void *v, const int32_t *table, const int32_t *blocks, float *out, const float *sinks,
               int64_t q_stride, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t width, int64_t window, int64_t half,
               float scale, float softcap, int64_t threads) {
#pragma omp parallel num_threads(threads)
    attention_share(q, k, v, table, blocks, out, sinks, q_stride, count, heads, kv_heads, dim, width, window, half, scale, softcap, 0);
}

// Put keys and values [tokens, kv_heads, dim], tokens `stride` apart, into the pages at `slots` (page * PAGE + place).
void store_share(const float *keys, const float *values, const int64_t *slots, void *k, void *v, int64_t stride, int64_t tokens,
                 int64_t kv_heads, int64_t dim, int64_t half) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t page = slots[i] / PAGE * PAGE * kv_heads * dim, place = slots[i] % PAGE;
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t from = i * stride + head * dim, to = page + head * dim * PAGE;
            for (int64_t d = 0; d < dim; d++) put(k, to + d * PAGE + place, keys[from + d], half);
            for (int64_t d = 0; d < dim; d++) put(v, to + place * dim + d, values[from + d], half);
        }
    }
}

void store_keys_values(const float *keys, const float *values, const int64_t *slots, void *k, void *v, int64_t stride, int64_t tokens,
                       int64_t kv_heads, int64_t dim, int64_t half, int64_t threads) {
#pragma omp parallel num_threads(tokens < 32 ? 1 : threads)
    store_share(keys, values, slots, k, v, stride, tokens, kv_heads, dim, half);
}
