// What linear.c and those that call it share.
#pragma once
#include "vectors.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

enum { WHOLE, WIDENED, PAIRS };  // kinds of panels, see linear.c
enum { STORE, ADD, GATED };      // out = y (+ bias); out += y (+ bias); out = silu(first half of each panel) * second half

// One weight. bias: [panels * PANEL] or NULL.
typedef struct {
    const char *panels;
    const float *bias;
    int64_t depth, columns, kind, mode;
} product;

// The part of `total` that the calling thread of a team has: from the result to `end`.
INLINE int64_t own_part(int64_t total, int64_t *end) {
    int64_t me = 0, all = 1;
#if defined(_OPENMP)
    me = omp_get_thread_num(), all = omp_get_num_threads();
#endif
    *end = total * (me + 1) / all;
    return total * me / all;
}

void linear_share(const void *x, const product *weight, void *out, int64_t x_stride, int64_t out_stride, int64_t rows, int64_t to_half,
                  const product *after);
