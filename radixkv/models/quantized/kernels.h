// Declarations that kernels.cpp and step.cpp share.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE inline __attribute__((always_inline)) TARGET

enum Format { INT8, INT4, INT4_MIN, FLOAT };

struct Weights {
    uint8_t* data;
    int64_t outputs, groups, format;
};

// libgomp's GOMP_parallel. Where a function takes it, null means that one thread does all.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

extern "C" int radixkv_multiply(const Weights* const* weights, const float* const* biases, int64_t count, const float* x,
                                float* y, int64_t rows, int64_t instructions, int64_t threads, Parallel parallel);

namespace {

constexpr long KEPT = 1 << 20;  // numbers whose memory a thread keeps

// Memory for numbers, which a thread keeps for its next call unless it is large.
struct Memory {
    float* at = nullptr;
    long size = 0;

    float* numbers(long count) {
        if (count > size) {
            std::free(at);
            at = (float*)std::malloc(count * sizeof(float));
            size = at ? count : 0;
        }
        return at;
    }
    void release() {
        if (size <= KEPT) return;
        std::free(at);
        at = nullptr;
        size = 0;
    }
    ~Memory() { std::free(at); }
};

template <class Unit>
struct Units {
    const Unit& run;
    long count;
    std::atomic<long> next;

    static void work(void* argument) {
        Units& units = *(Units*)argument;
        for (long unit; (unit = units.next++) < units.count;) units.run(unit);
    }
};

// Call run(unit) for each of `count` units, on `threads` threads.
template <class Unit>
void spread(long count, int64_t threads, Parallel parallel, const Unit& run) {
    Units<Unit> units{run, count, {0}};
    if (parallel && threads > 1 && count > 1)
        parallel(Units<Unit>::work, &units, (unsigned)threads, 0);
    else
        for (long unit = 0; unit < count; unit++) run(unit);
}

}  // namespace
