// The rest of a decoder layer, and the draw: each row by itself, in one order.
#include "vectors.h"

INLINE float mean_square(const float *x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    return sum / size;
}

INLINE void normalise(const float *x, const float *weight, void *out, int64_t at, int64_t size, float eps, const int half) {
    const float factor = 1.0f / sqrtf(mean_square(x, size) + eps);
    for (int64_t i = 0; i < size; i++) put(out, at + i, weight[i] * (x[i] * factor), half);
}

// out = weight * x / sqrt(mean(x^2) + eps); x, out: [rows, size], out in float32 or (half) bfloat16. Functions with `share` in their name
// are called by every thread of a team, and wait for nobody.
void rms_norm_share(const float *x, const float *weight, void *out, int64_t rows, int64_t size, float eps, int64_t half) {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row++) {
        if (half)
            normalise(x + row * size, weight, out, row * size, size, eps, 1);
        else
            normalise(x + row * size, weight, out, row * size, size, eps, 0);
    }
}

void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps, int64_t threads) {
#pragma omp parallel num_threads(rows < 32 ? 1 : threads)
    rms_norm_share(x, weight, out, rows, size, eps, 0);
}

// Rotary positions, in place: the `heads` first heads of x [tokens, stride], each halves (a, b) -> (a cos - b sin, b cos + a sin).
// cos, sin: [positions, dim / 2]. Before, the first `query_heads` of them are normalised by q_norm and the others by k_norm, where given.
void rotate_share(float *x, const float *cos, const float *sin, const int64_t *positions, const float *q_norm, const float *k_norm,
                  int64_t stride, int64_t tokens, int64_t heads, int64_t query_heads, int64_t dim, float eps) {
    const int64_t half = dim / 2;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tokens; i++) {
        const float *c = cos + positions[i] * half, *s = sin + positions[i] * half;
        for (int64_t head = 0; head < heads; head++) {
            float *a = x + i * stride + head * dim, *b = a + half;
            const float *weight = head < query_heads ? q_norm : k_norm;
            if (weight) normalise(a, weight, a, 0, dim, eps, 0);
            for (int64_t d = 0; d < half; d++) {
                const float first = a[d], second = b[d];
                a[d] = first * c[d] - second * s[d];
                b[d] = second * c[d] + first * s[d];
            }
        }
    }
}

void rotate(float *x, const float *cos, const float *sin, const int64_t *positions, const float *q_norm, const float *k_norm,
            int64_t stride, int64_t tokens, int64_t heads, int64_t query_heads, int64_t dim, float eps, int64_t threads) {
#pragma omp parallel num_threads(tokens < 32 ? 1 : threads)
    rotate_share(x, cos, sin, positions, q_norm, k_norm, stride, tokens, heads, query_heads, dim, eps);
}

// The finaliser of SplitMix64.
INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// out: [rows], the random numbers of counted.py for the tokens at `positions` of the requests `keys`.
void uniforms(const uint64_t *keys, const uint64_t *positions, float *out, int64_t rows, int64_t threads) {
    for (int64_t i = 0; i < rows; i++) out[i] = (mixed(mixed(keys[i] + 0x9E3779B97F4A7C15u) ^ positions[i]) >> 40) / (float)(1 << 24);
}

#define CHUNK 256

// One token a row from logits [rows, size]: where the running sum of probabilities passes `uniform`, or the likeliest (greedy); and its
// log-prob. Not finite where a logit is NaN or +inf. In two levels: first the chunk of tokens, then the token in it.
void draw(const float *logits, const float *uniform, int64_t *tokens, float *log_probs, int64_t rows, int64_t size, int64_t greedy,
          float temperature, int64_t threads) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * size;
        float largest = -INFINITY, sums[chunks], total = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < size; i++) largest = x[i] > largest ? x[i] : largest;
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t end = chunk * CHUNK + CHUNK < size ? chunk * CHUNK + CHUNK : size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = chunk * CHUNK; i < end; i++) sum += exp_negative((x[i] - largest) / temperature);
            sums[chunk] = sum, total += sum;
        }
        int64_t token = 0;
        if (greedy) {
            while (token < size - 1 && x[token] != largest) token++;
        } else {
            float rest = uniform[row] * total;
            int64_t chunk = 0;
            // Rounding may leave a rest that nothing takes: then it is the last chunk, and the last token, with any weight.
            for (int64_t c = 0; c < chunks; c++) {
                if (sums[c] > 0.0f) chunk = c;
                if (rest < sums[c]) break;
                rest -= sums[c];
            }
            token = chunk * CHUNK;
            for (int64_t i = chunk * CHUNK; i < size && i < chunk * CHUNK + CHUNK; i++) {
                const float weight = exp_negative((x[i] - largest) / temperature);
                if (weight > 0.0f) token = i;
                if (rest < weight) break;
                rest -= weight;
            }
        }
        tokens[row] = token;
        log_probs[row] = (x[token] - largest) / temperature - logf(total);
    }
}
