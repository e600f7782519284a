// Weights laid out in the panels of linear.c, and memory for them.
#define _GNU_SOURCE
#include "vectors.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define PANEL (2 * LANES)
#define DEEP 16  // inputs that are turned at a time

// panels: of `count` * PANEL columns, from `rows`, the addresses of their weights in the panels' order (0: zeros). `half` says whether the
// weights are bfloat16; float32 is cut to it only where that holds it (`holds`). A 32-bit word of the panel is a number, or has two:
// of a column of the first half of the panel and one of the second (WIDENED), or of two inputs (PAIRS, whose depth is even).
void pack(const int64_t *rows, void *panels, int64_t count, int64_t depth, int64_t half, int64_t kind, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        for (int64_t start = 0; start < depth; start += DEEP) {
            const int64_t deep = depth - start < DEEP ? depth - start : DEEP, to = (p * depth + start) * PANEL;
            uint32_t words[DEEP][PANEL];
            uint16_t halves[DEEP * PANEL];
            for (int c = 0; c < PANEL; c++) {
                const int64_t row = rows[p * PANEL + c];
                for (int64_t i = 0; i < deep; i++) {
                    const int64_t at = kind == PAIRS ? (i / 2 * PANEL + c) * 2 + i % 2 : i * PANEL + c % LANES * 2 + c / LANES;
                    if (kind == WHOLE)
                        words[i][c] = row ? ((const uint32_t *)row)[start + i] : 0;
                    else if (half)
                        halves[at] = row ? ((const uint16_t *)row)[start + i] : 0;
                    else
                        halves[at] = row ? ((const uint32_t *)row)[start + i] >> 16 : 0;
                }
            }
            if (kind == WHOLE)
                memcpy((uint32_t *)panels + to, words, deep * sizeof words[0]);
            else
                memcpy((uint16_t *)panels + to, halves, deep * PANEL * sizeof halves[0]);
        }
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
