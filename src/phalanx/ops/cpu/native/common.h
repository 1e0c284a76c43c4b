// What every kernel shares: the vector type, bfloat16, exp, scratch memory.
//
// Vectors are GCC/clang vector extensions of the machine's width, so that one source serves AVX-512, AVX2 and NEON;
// loops over elements are left to the compiler's vectoriser.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { W = 16 };
#elif defined(__AVX__)
enum { W = 8 };
#else
enum { W = 4 };
#endif
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));      // loads need no alignment
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));

// bfloat16 is the upper half of a float.
struct bf16 {
    uint16_t bits;
};
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE void store(float* to, float x) { *to = x; }
INLINE void store(bf16* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;   // to the nearest, ties to even
    to->bits = x != x ? 0x7fc0 : rounded;
}

// exp to 1 unit in the last place, without a branch so that loops over it vectorise; overflow gives inf, underflow
// gives subnormals and 0, NaN stays NaN.
INLINE float fast_exp(float x) {
    x = x < -150.0f ? -150.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float magic = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
    float n = (x * 1.44269504f + magic) - magic;
    float r = x - n * 0.693359375f;    // ln 2 in two parts, the first short, so that n * part is exact
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t i = (int32_t)n, half = i >> 1;
    int32_t a = (half + 127) << 23, b = (i - half + 127) << 23;   // 2^n in two factors: one alone may overflow
    float fa, fb;
    memcpy(&fa, &a, 4);
    memcpy(&fb, &b, 4);
    return p * fa * fb;
}

// Memory of a thread that grows to the largest need and stays: a fresh large malloc would cost a page fault every 4 KiB
// at every call. One for each thread and use (thread_local), so that engines in several threads do not meet.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    void* get(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
            if (!memory) abort();
        }
        return memory;
    }
    ~Scratch() { free(memory); }
};

constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }
constexpr long least(long a, long b) { return a < b ? a : b; }
constexpr long most(long a, long b) { return a > b ? a : b; }
