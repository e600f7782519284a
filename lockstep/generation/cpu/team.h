// Threads that compute a pass together: which part of the work is whose, and waiting for the others.
#pragma once
#include <stdint.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#else
static inline int sched_yield(void) { return 0; }
#endif

#define SPINS 4096  // looks before a processor is offered to somebody else: a few microseconds

static inline int team_size(void) {
#if defined(_OPENMP)
    return omp_get_num_threads();
#else
    return 1;
#endif
}

static inline int team_number(void) {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// The part of `total` that the calling thread has: from the result to `end`.
static inline int64_t own_part(int64_t total, int64_t *end) {
    *end = total * (team_number() + 1) / team_size();
    return total * team_number() / team_size();
}

// Where the threads of a team wait for one another; zeros at first. OpenMP's barrier looks for milliseconds whether the others have come:
// where a thread that is waited for has no processor, because the machine does something else too, that is time it could have had.
typedef struct {
    int arrived, round;
} meeting;

static inline void meet(meeting *at) {
    const int round = __atomic_load_n(&at->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&at->arrived, 1, __ATOMIC_ACQ_REL) == team_size()) {
        __atomic_store_n(&at->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&at->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int looks = 0; __atomic_load_n(&at->round, __ATOMIC_ACQUIRE) == round; looks++) {
        if (looks >= SPINS) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}
