// Matrix products with a weight that was laid out in panels before: out = x W^T.
//
// A panel holds 2 * LANES output columns: for each input the weights of all these columns, side by side. A tile of up to TILE_ROWS rows
// keeps its sums in registers and walks down the panel once; meanwhile what comes next is fetched from memory, so that a product with many
// rows computes at full speed and one with few reads at full speed. Rows are dealt to tiles evenly: one of a single row takes as long as
// one of four. A number of the result is a sum of sums over BLOCK inputs in their order, whatever the other rows are: it has the same bits
// in any batch, and rounds less than one long sum would.
//
// There are three kinds of panels: float32; bfloat16 that is widened, for the same float32 rows; and bfloat16 for rows in bfloat16, which the
// processor multiplies in pairs of inputs and adds in float32.
#include "linear.h"
#include "team.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define PANEL (2 * LANES)
#define BLOCK 128
#define CHUNK (8 * TILE_ROWS)  // most rows that stay in the cache while the panels go by
#define AHEAD 8192             // bytes: how far ahead one tile alone reads its panel


int panel_columns(void) { return PANEL; }

int has_pairs(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Bytes of a panel for one step down it: an input, or a pair of them.
INLINE int step_bytes(const int kind) { return kind == WIDENED ? PANEL * 2 : PANEL * 4; }

// sum += x * column, where x is a number, or with PAIRS two of them.
INLINE lanes times(const int kind, uint32_t x, lanes column, lanes sum) {
#if defined(__AVX512BF16__)
    if (kind == PAIRS) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column, (__m512bh)_mm512_set1_epi32(x));
#endif
    union { uint32_t bits; float value; } one = {x};
    return sum + one.value * column;
}

INLINE float silu(float x) {
    const float e = exp_negative(x < 0.0f ? x : -x);
    return x * ((x < 0.0f ? e : 1.0f) / (1.0f + e));
}

// sums: [rows, PANEL] = x times the panel; x: 32-bit words, each a number or a pair, rows x_stride of them apart; depth: in words.
INLINE void tile(const int rows, const uint32_t *x, int64_t x_stride, const char *panel, const int kind, int depth, const char *next,
                 int64_t pace, float *out) {
    const int block = kind == PAIRS ? BLOCK / 2 : BLOCK;
    memset(out, 0, rows * PANEL * sizeof(float));
#pragma GCC unroll 1
    for (int start = 0; start < depth; start += block) {
        const int end = depth - start < block ? depth : start + block;
        lanes sums[2 * TILE_ROWS];
#pragma GCC unroll 24
        for (int i = 0; i < 2 * rows; i++) sums[i] = (lanes){0};
#pragma GCC unroll 1
        for (int k = start; k < end; k++) {
            lanes low, high;
            if (kind == WIDENED) {  // one 32-bit word holds a column of the first half of the panel and one of the second
                const words both = *(const unaligned_words *)panel;
                low = (lanes)(both << 16), high = (lanes)(both & 0xffff0000u);
            } else {
                low = load((const float *)panel), high = load((const float *)panel + LANES);
            }
            __builtin_prefetch(next, 0, 3);
            __builtin_prefetch(next + 64, 0, 3);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const uint32_t a = x[r * x_stride + k];
                sums[2 * r] = times(kind, a, low, sums[2 * r]), sums[2 * r + 1] = times(kind, a, high, sums[2 * r + 1]);
            }
            panel += step_bytes(kind), next += pace;
        }
#pragma GCC unroll 24
        for (int i = 0; i < 2 * rows; i++) store(out + i * LANES, load(out + i * LANES) + sums[i]);
    }
}

// What becomes of the sums y [rows, PANEL] of a tile. out: float32 or (to_half) bfloat16.
static void finish(float *y, int rows, const float *bias, void *out, int64_t at, int64_t out_stride, int columns, int mode, int to_half) {
    for (int r = 0; r < rows; r++, y += PANEL, at += out_stride) {
        lanes low = load(y), high = load(y + LANES);
        if (bias) low += load(bias), high += load(bias + LANES);
        store(y, low), store(y + LANES, high);
        if (mode == GATED)
            for (int c = 0; c < LANES; c++) y[c] = silu(y[c]) * y[LANES + c];
        if (columns == PANEL && !to_half) {  // as nearly all, but for those with a gate
            if (mode == ADD) low += load((float *)out + at), high += load((float *)out + at + LANES);
            store((float *)out + at, low), store((float *)out + at + LANES, high);
        } else if (columns == LANES && mode == GATED && !to_half) {
            store((float *)out + at, load(y));
        } else {
            if (mode == ADD)
                for (int c = 0; c < columns; c++) y[c] += ((const float *)out)[at + c];
            for (int c = 0; c < columns; c++) put(out, at + c, y[c], to_half);
        }
    }
}

// next_panel: what is computed with after this panel.
INLINE void chunk_times_panel(const uint32_t *x, int64_t x_stride, int rows, const char *panel, const char *next_panel, const int kind,
                              int depth, const float *bias, void *out, int64_t at, int64_t out_stride, int columns, int mode, int to_half) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t pace = step_bytes(kind) / tiles;  // several tiles ask for the next panel, evenly
    const char *next = tiles == 1 ? panel + AHEAD : next_panel;
    for (int first = 0, left = tiles, here; first < rows; first += here, left--, next += pace * depth) {
        here = (rows - first + left - 1) / left;
        const uint32_t *from = x + first * x_stride;
        float y[TILE_ROWS * PANEL];
        switch (here) {
#define CASE(n) case n: tile(n, from, x_stride, panel, kind, depth, next, pace, y); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
        finish(y, here, bias, out, at + first * out_stride, out_stride, columns, mode, to_half);
    }
}

// How a product with so many rows is cut: chunks of rows, and panels.
typedef struct {
    int64_t chunks, size, panels, width, panel_bytes;
} cut;

INLINE cut cut_of(const product *weight, int64_t rows) {
    const int64_t chunks = (rows + CHUNK - 1) / CHUNK, width = weight->mode == GATED ? LANES : PANEL;
    const int64_t steps = weight->kind == PAIRS ? weight->depth / 2 : weight->depth;
    return (cut){chunks, chunks ? (rows + chunks - 1) / chunks : 0, (weight->columns + width - 1) / width, width, steps * step_bytes(weight->kind)};
}

// Where the calling thread begins to read a weight.
INLINE const char *first_panel(const product *weight, int64_t rows) {
    const cut c = cut_of(weight, rows);
    int64_t end;
    return weight->panels + own_part(c.chunks * c.panels, &end) % c.panels * c.panel_bytes;
}

// x: [rows, depth], rows x_stride apart, float32 or (PAIRS) bfloat16; out: [rows, columns], rows out_stride apart, float32 or (to_half, not
// with ADD) bfloat16. Every thread of a team calls this, for its part. The beginning of what it multiplies with after this (NULL: not known)
// is fetched meanwhile: between two products memory would have nothing to do.
void linear_share(const void *x, const product *weight, void *out, int64_t x_stride, int64_t out_stride, int64_t rows, int64_t to_half,
                  const product *after) {
    const int64_t kind = weight->kind, mode = weight->mode, words = kind == PAIRS ? 2 : 1, depth = weight->depth / words;
    const cut c = cut_of(weight, rows);
    const char *following = after ? first_panel(after, rows) : weight->panels;
    int64_t end;
    for (int64_t i = own_part(c.chunks * c.panels, &end); i < end; i++) {
        const int64_t p = i % c.panels, first = i / c.panels * c.size, here = rows - first < c.size ? rows - first : c.size;
        const int wide = weight->columns - p * c.width < c.width ? weight->columns - p * c.width : c.width;
        const uint32_t *from = (const uint32_t *)x + first * (x_stride / words);
        const char *panel = weight->panels + p * c.panel_bytes;
        const char *next = i + 1 == end ? following : p + 1 == c.panels ? weight->panels : panel + c.panel_bytes;
        const float *bias = weight->bias ? weight->bias + p * PANEL : 0;
#define TIMES(kind) \
    chunk_times_panel(from, x_stride / words, here, panel, next, kind, depth, bias, out, first * out_stride + p * c.width, out_stride, wide, \
                      mode, to_half)
        if (kind == WHOLE)
            TIMES(WHOLE);
        else if (kind == WIDENED)
            TIMES(WIDENED);
        else
            TIMES(PAIRS);
#undef TIMES
    }
    if (rows <= TILE_ROWS)
        for (int i = 0; i < AHEAD; i += 64) __builtin_prefetch(following + i, 0, 3);
}

void linear(const void *x, const char *panels, const float *bias, void *out, int64_t x_stride, int64_t out_stride, int64_t rows,
            int64_t depth, int64_t columns, int64_t kind, int64_t mode, int64_t to_half, int64_t threads) {
    const product weight = {panels, bias, depth, columns, kind, mode};
#pragma omp parallel num_threads(threads)
    linear_share(x, &weight, out, x_stride, out_stride, rows, to_half, 0);
}
