// Vectors of float32: the only file of this folder that knows the processor and the compiler.
#pragma once

#if defined(__AVX512F__)
constexpr long LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4; // 24 of 32 registers hold sums
#elif defined(__aarch64__)
constexpr long LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4;
#else
constexpr long LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2; // 12 of 16
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int Bits __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vector load(const float *from) { return *(const Unaligned *)from; }

static inline void store(float *to, Vector x) { *(Unaligned *)to = x; }

static inline Vector zero() { return Vector{}; }

// ReLU; what is not a number stays so.
static inline Vector rectified(Vector x) { return (Vector)(~(Bits)(x < zero()) & (Bits)x); }

// The gradient where a ReLU's output is not zero.
static inline Vector passed(Vector gradient, Vector output) {
  return (Vector)(~(Bits)(output <= zero()) & (Bits)gradient);
}
