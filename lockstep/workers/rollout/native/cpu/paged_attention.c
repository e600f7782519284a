// Decoding attention over pages: one new token a row, read against the keys and values of its pages, in place.
//
// The query heads that share a key head are computed together, so each key and value is read once. Softmax goes page by page with a
// running maximum. A row is computed by one thread in one order, whatever the batch: its result depends on nothing else.
#include <math.h>
#include <stdint.h>
#include <string.h>

// exp(x) for x <= 0, to 2 units in the last place; written so that the compiler can compute several at once. exp(-inf) is 0.
static inline float exp_negative(float x) {
    float clipped = x < -87.0f ? -87.0f : x;
    float whole = __builtin_rintf(clipped * 1.44269504f);
    float rest = clipped - whole * 0.693359375f;
    rest -= whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    union { int32_t bits; float value; } power;
    power.bits = ((int32_t)whole + 127) << 23;
    return x < -87.0f ? 0.0f : p * power.value;
}

// One row and one key head: the queries of that head's group against the row's keys.
static inline __attribute__((always_inline)) void attend(const float *queries, const float *k, const float *v, const int32_t *pages,
                                                         int length, float *out, int groups, int64_t token, const int dim,
                                                         int page_size, float scale, int window, float softcap, const float *sinks) {
    float scores[groups][page_size], sums[groups][dim], largest[groups], total[groups];
    memset(sums, 0, sizeof sums);
    for (int g = 0; g < groups; g++) {
        largest[g] = sinks ? sinks[g] : -INFINITY;
        total[g] = sinks ? 1.0f : 0.0f;
    }
    const int first = window && length > window ? length - window : 0;
    for (int page = first / page_size; page * page_size < length; page++) {
        const float *keys = k + pages[page] * page_size * token, *values = v + pages[page] * page_size * token;
        const int begin = first > page * page_size ? first - page * page_size : 0;
        const int end = length - page * page_size < page_size ? length - page * page_size : page_size;
        for (int g = 0; g < groups; g++) {
            for (int t = begin; t < end; t++) {
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int d = 0; d < dim; d++) dot += queries[g * dim + d] * keys[t * token + d];
                scores[g][t] = dot * scale;
            }
            if (softcap > 0.0f)
                for (int t = begin; t < end; t++) scores[g][t] = softcap * tanhf(scores[g][t] / softcap);
        }
        for (int g = 0; g < groups; g++) {
            float most = largest[g];
            for (int t = begin; t < end; t++) most = scores[g][t] > most ? scores[g][t] : most;
            // Without any score above -inf (or with none that is a number) there is nothing to subtract.
            const float base = most == -INFINITY ? 0.0f : most;
            const float correction = largest[g] == -INFINITY ? 0.0f : exp_negative(largest[g] - base);
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int t = begin; t < end; t++) {
                scores[g][t] = exp_negative(scores[g][t] - base);
                sum += scores[g][t];
            }
            total[g] = total[g] * correction + sum;
            largest[g] = most;
            if (correction != 1.0f)
                for (int d = 0; d < dim; d++) sums[g][d] *= correction;
        }
        for (int g = 0; g < groups; g++)
            for (int t = begin; t < end; t++)
#pragma omp simd
                for (int d = 0; d < dim; d++) sums[g][d] += scores[g][t] * values[t * token + d];
    }
    for (int g = 0; g < groups; g++)
        for (int d = 0; d < dim; d++) out[g * dim + d] = sums[g][d] / total[g];
}

// q, out: [rows, heads, dim]; k, v: [pages, page_size, kv_heads, dim]; table: [rows, width]; lengths: [rows], keys of each row.
// window 0: none; softcap 0: none; sinks: [heads] or NULL.
void paged_attention(const float *q, const float *k, const float *v, const int32_t *table, const int32_t *lengths, float *out,
                     int rows, int heads, int kv_heads, int dim, int page_size, int width, float scale, int window, float softcap,
                     const float *sinks, int threads) {
    const int groups = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
    for (int row = 0; row < rows; row++) {
        for (int head = 0; head < kv_heads; head++) {
            const int64_t at = ((int64_t)row * heads + (int64_t)head * groups) * dim, start = (int64_t)head * dim;
            const int32_t *pages = table + (int64_t)row * width;
            const float *own = sinks ? sinks + head * groups : 0;
#define ATTEND(size) \
    attend(q + at, k + start, v + start, pages, lengths[row], out + at, groups, (int64_t)kv_heads * dim, size, page_size, scale, window, \
           softcap, own)
            // The same code for each size: the compiler unrolls the loops whose length it knows.
            if (dim == 64)
                ATTEND(64);
            else if (dim == 128)
                ATTEND(128);
            else
                ATTEND(dim);
#undef ATTEND
        }
    }
}
