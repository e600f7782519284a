// What linear.c and those that call it share.
#pragma once
#include "vectors.h"

enum { WHOLE, WIDENED, PAIRS };  // kinds of panels, see linear.c
enum { STORE, ADD, GATED };      // out = y (+ bias); out += y (+ bias); out = silu(first half of each panel) * second half

// One weight. bias: [panels * PANEL] or NULL.
typedef struct {
    const char *panels;
    const float *bias;
    int64_t depth, columns, kind, mode;
} product;

void linear_share(const void *x, const product *weight, void *out, int64_t x_stride, int64_t out_stride, int64_t rows, int64_t to_half,
                  const product *after);
