// What the kernels share: vectors as wide as the processor's, and exp. GCC and clang compile the arithmetic on `lanes` to vector instructions.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 12  // sums of a tile: 12 x 2 of 32 vector registers
#elif defined(__AVX2__)
#define LANES 8
#define TILE_ROWS 6
#else
#define LANES 4
#define TILE_ROWS 6
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t unaligned_words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

#define INLINE static inline __attribute__((always_inline))

INLINE lanes load(const float *at) { return *(const unaligned_lanes *)at; }
INLINE void store(float *at, lanes x) { *(unaligned_lanes *)at = x; }

// LANES numbers at place `i` of float32 or (half) bfloat16 memory.
INLINE lanes load_either(const void *memory, int64_t i, const int half) {
    if (!half) return load((const float *)memory + i);
    return (lanes)(__builtin_convertvector(*(const halves *)((const uint16_t *)memory + i), words) << 16);
}

INLINE float number(const void *memory, int64_t i, const int half) {
    if (!half) return ((const float *)memory)[i];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)memory)[i] << 16};
    return wide.value;
}

// To the nearest, ties to even; what is not a number stays none.
INLINE void put(void *memory, int64_t i, float x, const int half) {
    union { float value; uint32_t bits; } wide = {x};
    if (!half)
        ((float *)memory)[i] = x;
    else
        ((uint16_t *)memory)[i] = x != x ? 0x7fc0 : (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
}

// exp(x) for x <= 0, to 2 units in the last place; written so that the compiler can compute several at once. exp(-inf) is 0.
INLINE float exp_negative(float x) {
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
