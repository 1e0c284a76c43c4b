// What every kernel shares: the vector type, bfloat16, exp, scratch memory.
//
// Vectors are GCC/clang vector extensions of the machine's width, so that one source serves AVX-512, AVX2 and NEON;
// loops over elements are left to the compiler's vectoriser.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { W = 16 };
#elif defined(__AVX__)
enum { W = 8 };
#else
enum { W = 4 };
#endif
// Loads and stores of vectors need no alignment.
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2), may_alias));

// bfloat16 is the upper half of a float; a float is rounded to it to the nearest, ties to even.
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
    to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE vec load(const float* from) { return *(const vec*)from; }
INLINE vec load(const bf16* from) { return (vec)(__builtin_convertvector(*(const hvec*)from, uvec) << 16); }
INLINE void store(float* to, vec x) { *(vec*)to = x; }
INLINE void store(bf16* to, vec x) {
#ifdef __AVX512BF16__
    *(hvec*)to = (hvec)_mm512_cvtneps_pbh(x);
    return;
#endif
    uvec bits = (uvec)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(hvec*)to = __builtin_convertvector(x != x ? uvec{} + 0x7fc0 : rounded, hvec);
}

// exp to 1 unit in the last place; overflow gives inf, underflow gives subnormals and 0, NaN stays NaN.
INLINE vec fast_exp(vec x) {
    const vec low = vec{} - 150.0f, high = vec{} + 89.0f;
    const float magic = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
#ifdef __AVX512F__
    x = _mm512_min_ps(high, _mm512_max_ps(low, x));
#else
    x = x < low ? low : x;
    x = x > high ? high : x;
#endif
    const vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f;      // ln 2 in two parts, the first short, so that n * part is exact
    r = r - n * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
#ifdef __AVX512F__
    return _mm512_scalef_ps(p, n);
#else
    const ivec i = __builtin_convertvector(n, ivec), half = i >> 1;   // 2^n in two factors: one alone may overflow
    return p * (vec)((half + 127) << 23) * (vec)((i - half + 127) << 23);
#endif
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
