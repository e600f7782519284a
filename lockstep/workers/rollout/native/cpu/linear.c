// Matrix products with a weight that was laid out in panels before: out = x W^T.
//
// A panel holds 2 * LANES output columns: for each input the weights of all these columns, side by side. A tile of up to TILE_ROWS rows
// keeps its sums in registers and walks down the panel once; meanwhile what comes next is fetched from memory, so that a product with many
// rows computes at full speed and one with few reads at full speed. Rows are dealt to tiles evenly: one of a single row takes as long as
// one of four. A number of the result is a sum of sums over BLOCK inputs in their order, whatever the other rows are: it has the same bits
// in any batch, and rounds less than one long sum would.
#include "vectors.h"

#define PANEL (2 * LANES)
#define BLOCK 128
#define CHUNK (8 * TILE_ROWS)  // most rows that stay in the cache while the panels go by
#define AHEAD 8192             // bytes: how far ahead one tile alone reads its panel

enum { STORE, ADD, GATED };  // out = y (+ bias); out += y (+ bias); out = silu(first half of each panel) * second half

int panel_columns(void) { return PANEL; }

INLINE float silu(float x) {
    const float e = exp_negative(x < 0.0f ? x : -x);
    return x * ((x < 0.0f ? e : 1.0f) / (1.0f + e));
}

// sums: [rows, PANEL] = x times the panel.
INLINE void tile(const int rows, const float *x, int64_t x_stride, const char *panel, const int half, int depth, const char *next,
                 int64_t pace, float *out) {
    const int bytes = PANEL * (half ? 2 : 4);
    memset(out, 0, rows * PANEL * sizeof(float));
#pragma GCC unroll 1
    for (int start = 0; start < depth; start += BLOCK) {
        const int end = depth - start < BLOCK ? depth : start + BLOCK;
        lanes sums[2 * TILE_ROWS];
#pragma GCC unroll 24
        for (int i = 0; i < 2 * rows; i++) sums[i] = (lanes){0};
#pragma GCC unroll 1
        for (int k = start; k < end; k++) {
            lanes low, high;
            if (half) {  // one 32-bit word holds a column of the first half of the panel and one of the second
                const words both = *(const unaligned_words *)panel;
                low = (lanes)(both << 16), high = (lanes)(both & 0xffff0000u);
            } else {
                low = load((const float *)panel), high = load((const float *)panel + LANES);
            }
            __builtin_prefetch(next, 0, 3);
            __builtin_prefetch(next + 64, 0, 3);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const float a = x[r * x_stride + k];
                sums[2 * r] += a * low, sums[2 * r + 1] += a * high;
            }
            panel += bytes, next += pace;
        }
#pragma GCC unroll 24
        for (int i = 0; i < 2 * rows; i++) store(out + i * LANES, load(out + i * LANES) + sums[i]);
    }
}

// What becomes of the sums y [rows, PANEL] of a tile.
static void finish(float *y, int rows, const float *bias, float *out, int64_t out_stride, int columns, int mode) {
    for (int r = 0; r < rows; r++, y += PANEL, out += out_stride) {
        if (bias)
            for (int c = 0; c < PANEL; c++) y[c] += bias[c];
        if (mode == GATED)
            for (int c = 0; c < LANES; c++) y[c] = silu(y[c]) * y[LANES + c];
        else if (mode == ADD)
            for (int c = 0; c < columns; c++) y[c] += out[c];
        memcpy(out, y, columns * sizeof(float));
    }
}

INLINE void chunk_times_panel(const float *x, int64_t x_stride, int rows, const char *panel, const int half, int depth,
                              const float *bias, float *out, int64_t out_stride, int columns, int mode) {
    const int bytes = PANEL * (half ? 2 : 4), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t pace = bytes / tiles;  // several tiles ask for the next panel, evenly
    const char *next = panel + (tiles == 1 ? AHEAD : (int64_t)depth * bytes);
    for (int first = 0, left = tiles, here; first < rows; first += here, left--, next += pace * depth) {
        here = (rows - first + left - 1) / left;
        const float *from = x + first * x_stride;
        float y[TILE_ROWS * PANEL];
        switch (here) {
#define CASE(n) case n: tile(n, from, x_stride, panel, half, depth, next, pace, y); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
        finish(y, here, bias, out + first * out_stride, out_stride, columns, mode);
    }
}

// x: [rows, depth], rows x_stride apart; panels: see above, float32 or (half) bfloat16; bias: [panels * PANEL] or NULL;
// out: [rows, columns], rows out_stride apart. Every thread of a team calls this, for its share.
void linear_share(const float *x, const char *panels, const float *bias, float *out, int64_t x_stride, int64_t out_stride, int64_t rows,
                  int64_t depth, int64_t columns, int64_t half, int64_t mode) {
    const int width = mode == GATED ? LANES : PANEL, count = (columns + width - 1) / width, chunks = (rows + CHUNK - 1) / CHUNK;
    const int64_t panel_bytes = (int64_t)depth * PANEL * (half ? 2 : 4), size = chunks ? (rows + chunks - 1) / chunks : 0;
#pragma omp for collapse(2) schedule(static)
    for (int chunk = 0; chunk < chunks; chunk++) {
        for (int p = 0; p < count; p++) {
            const int64_t first = chunk * size, here = rows - first < size ? rows - first : size;
            const int wide = columns - p * width < width ? columns - p * width : width;
            const float *from = x + first * x_stride, *own = bias ? bias + p * PANEL : 0;
            float *to = out + first * out_stride + p * width;
            if (half)
                chunk_times_panel(from, x_stride, here, panels + p * panel_bytes, 1, depth, own, to, out_stride, wide, mode);
            else
                chunk_times_panel(from, x_stride, here, panels + p * panel_bytes, 0, depth, own, to, out_stride, wide, mode);
        }
    }
}

void linear(const float *x, const char *panels, const float *bias, float *out, int64_t x_stride, int64_t out_stride, int64_t rows,
            int64_t depth, int64_t columns, int64_t half, int64_t mode, int64_t threads) {
#pragma omp parallel num_threads(threads)
    linear_share(x, panels, bias, out, x_stride, out_stride, rows, depth, columns, half, mode);
}
