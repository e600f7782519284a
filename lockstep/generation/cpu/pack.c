// Weights laid out in the panels of linear.c, and memory for them.
#define _GNU_SOURCE
#include "linear.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define PANEL (2 * LANES)
#define DEEP 16  // words that are turned at a time

typedef uint32_t quad __attribute__((vector_size(16)));
typedef uint32_t unaligned_quad __attribute__((vector_size(16), aligned(4)));

// to [4 words of rows c to c + 3] at PANEL apart = from [4 rows][4 words], turned.
INLINE void turn_four(const uint32_t *const *from, int64_t at, uint32_t *to) {
    const quad a = *(const unaligned_quad *)(from[0] + at), b = *(const unaligned_quad *)(from[1] + at);
    const quad c = *(const unaligned_quad *)(from[2] + at), d = *(const unaligned_quad *)(from[3] + at);
    const quad low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const quad ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
    const quad ab_high = __builtin_shuffle(a, b, high), cd_high = __builtin_shuffle(c, d, high);
    *(unaligned_quad *)to = __builtin_shuffle(ab, cd, first), *(unaligned_quad *)(to + PANEL) = __builtin_shuffle(ab, cd, second);
    *(unaligned_quad *)(to + 2 * PANEL) = __builtin_shuffle(ab_high, cd_high, first);
    *(unaligned_quad *)(to + 3 * PANEL) = __builtin_shuffle(ab_high, cd_high, second);
}

// A panel whose words are those of its columns' weights, `depth` of each: numbers, or pairs of them.
static void pack_words(const int64_t *rows, uint32_t *panel, int64_t depth) {
    const uint32_t *from[PANEL];
    for (int c = 0; c < PANEL; c++) from[c] = (const uint32_t *)rows[c];
    for (int64_t start = 0; start < depth; start += DEEP, panel += DEEP * PANEL) {
        for (int c = 0; c < PANEL; c += 4) {
            const int whole = from[c] && from[c + 1] && from[c + 2] && from[c + 3];
            for (int64_t i = start; i < start + DEEP && i < depth; i += 4) {
                if (whole && i + 4 <= depth)
                    turn_four(from + c, i, panel + (i - start) * PANEL + c);
                else
                    for (int64_t j = i; j < i + 4 && j < depth; j++)
                        for (int e = c; e < c + 4; e++) panel[(j - start) * PANEL + e] = from[e] ? from[e][j] : 0;
            }
        }
    }
}

// A panel in which a word has a column of the first half and one of the second; weights in bfloat16 (half), or in float32 that is cut to it.
static void pack_widened(const int64_t *rows, uint16_t *panel, int64_t depth, int64_t half) {
    for (int64_t start = 0; start < depth; start += DEEP, panel += DEEP * PANEL) {
        const int64_t deep = depth - start < DEEP ? depth - start : DEEP;
        for (int c = 0; c < PANEL; c++) {
            uint16_t *to = panel + c % LANES * 2 + c / LANES;
            const int64_t row = rows[c];
            for (int64_t i = 0; i < deep; i++, to += PANEL) {
                if (!row)
                    *to = 0;
                else
                    *to = half ? ((const uint16_t *)row)[start + i] : ((const uint32_t *)row)[start + i] >> 16;
            }
        }
    }
}

// panels: of `count` * PANEL columns, from `rows`, the addresses of their weights in the panels' order (0: zeros). `half` says whether the
// weights are bfloat16; float32 becomes it only where that holds it (`holds`). PAIRS has an even depth.
void pack(const int64_t *rows, void *panels, int64_t count, int64_t depth, int64_t half, int64_t kind, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        const int64_t words = kind == PAIRS ? depth / 2 : depth;
        if (kind == WIDENED)
            pack_widened(rows + p * PANEL, (uint16_t *)panels + p * depth * PANEL, depth, half);
        else
            pack_words(rows + p * PANEL, (uint32_t *)panels + p * words * PANEL, words);
    }
}

// result: whether bfloat16 holds each of the `count` float32 numbers x.
void holds(const uint32_t *x, int64_t *result, int64_t count, int64_t threads) {
    uint32_t bits = 0;
    for (int64_t start = 0; start < count && !(bits & 0xffff); start += 4096)
        for (int64_t i = start; i < count && i < start + 4096; i++) bits |= x[i];
    *result = !(bits & 0xffff);
}

// Ask for large pages of memory that nobody has touched: weights are read from end to end again and again.
void large_pages(void *memory, int64_t bytes, int64_t threads) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, first = ((uintptr_t)memory + page - 1) / page * page, end = ((uintptr_t)memory + bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
}
