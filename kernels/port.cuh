// The only file that depends on the compiler, and the mathematics that every compiler computes to the same bits.
//
// nvcc builds the sources for a GPU, g++ or clang (ziglang) for the CPU. All results are IEEE single precision from
// +, -, *, /, square root and bit operations alone: no libm, no double, no contraction of a*b+c (the build flags turn
// it off), so that g++ -O0, g++ -O3 with AVX-512, clang and nvcc agree in every bit. Only a NaN's payload may differ.
#pragma once

// -- Compiler ---------------------------------------------------------------------------------------------------------
#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define TABLE static __device__ const  // a constant array that is indexed at run time
#define VECTORIZE  // one thread per environment instead
#define UNROLL _Pragma("unroll 32")  // longer loops stay loops, their arrays in local memory
#else
#define DEVICE static inline __attribute__((always_inline))
#define TABLE static const
// -fopenmp-simd needs no OpenMP runtime: torch has its own, and two in a process compete for the cores.
#define VECTORIZE _Pragma("omp simd")
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace reagent_lite {

DEVICE unsigned bits_of(float x) {
#ifdef __CUDACC__
  return __float_as_uint(x);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
#endif
}

DEVICE float float_of(unsigned bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
#endif
}

DEVICE unsigned high_product(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }

// Stores a row of n floats at a multiple of n floats from the start of an allocation: 16 or 8 bytes at once if n is a
// multiple of 4 or 2, as nvcc would otherwise store the floats one by one.
template <int n>
DEVICE void store_row(float *to, const float *row) {
#ifdef __CUDACC__
  if constexpr (n % 4 == 0) {
    for (int k = 0; k < n; k += 4) *(float4 *)(to + k) = make_float4(row[k], row[k + 1], row[k + 2], row[k + 3]);
  } else if constexpr (n % 2 == 0) {
    for (int k = 0; k < n; k += 2) *(float2 *)(to + k) = make_float2(row[k], row[k + 1]);
  } else
#endif
  {
    for (int k = 0; k < n; ++k) to[k] = row[k];
  }
}

// Correctly rounded by IEEE 754 everywhere.
DEVICE float square_root(float x) {
#ifdef __CUDACC__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

DEVICE float floor_of(float x) {
#ifdef __CUDACC__
  return floorf(x);
#else
  return __builtin_floorf(x);
#endif
}

DEVICE void add_to(unsigned *word, unsigned value) {
#ifdef __CUDACC__
  atomicAdd(word, value);
#else
  __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
#endif
}

DEVICE void raise_to(unsigned *word, unsigned value) {
#ifdef __CUDACC__
  atomicMax(word, value);
#else
  unsigned seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// -- Mathematics ------------------------------------------------------------------------------------------------------
// Returns x, about which nvcc can then assume nothing. nvcc 13 compiles `x < 0.0f ? x : 0.0f` to a min, for which -0 is
// less than 0, so that the result is -0 where C++ says 0. It does so only if it knows that the last operand is no NaN.
DEVICE float opaque(float x) {
#ifdef __CUDACC__
  unsigned bits = bits_of(x);
  asm("" : "+r"(bits));
  return float_of(bits);
#else
  return x;
#endif
}

// Plain comparisons, not fminf/fmaxf: those treat NaN and -0 differently on different machines. A NaN x stays NaN.
DEVICE float absolute(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
DEVICE float minimum(float a, float b) {
  float otherwise = opaque(a);
  return b < otherwise ? b : otherwise;
}
DEVICE float maximum(float a, float b) {
  float otherwise = opaque(a);
  return b > otherwise ? b : otherwise;
}
DEVICE int minimum(int a, int b) { return b < a ? b : a; }
DEVICE int maximum(int a, int b) { return b > a ? b : a; }
DEVICE float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }
DEVICE int clamp(int x, int low, int high) { return x < low ? low : (x > high ? high : x); }

// a where the condition holds, else b, in bit operations: g++ turns `?:` into branches, moves loads into them, and then
// does not vectorize.
DEVICE float select(bool condition, float a, float b) {
  unsigned mask = 0u - unsigned(condition);
  return float_of((bits_of(a) & mask) | (bits_of(opaque(b)) & ~mask));
}

// x without its fraction; beyond 2^31 it is +-2147483520, and for NaN 0. Use it instead of int(x) if x is not known at
// compile time: beyond int's range int(x) is undefined in C++, and g++ 12.2 with -fno-trapping-math compiles
// float(int(x)) to one instruction that gives -0 for -0.5, where other compilers give 0.
DEVICE int whole_of(float x) {
  float size = x == x ? minimum(2147483520.0f, absolute(x)) : 0.0f;
  int whole = int(size);
  return x < 0.0f ? -whole : whole;
}

constexpr float pi = 3.14159265f;
constexpr float infinity = __builtin_inff();
constexpr float least_number = -3.40282347e38f;

// 1.5 * 2^23: adding it rounds a float below 2^22 to the nearest integer, which then stands in the low bits of the sum.
constexpr float rounder = 12582912.0f;

// pi/2 in three parts, the first two of 11 bits, so that k * part is exact below k = 2^13 (Cody and Waite, Software
// Manual for the Elementary Functions, 1980). The same parts times four are 2 pi.
constexpr float half_pi_1 = 1.5703125f;
constexpr float half_pi_2 = 4.837512969970703125e-4f;
constexpr float half_pi_3 = 7.549790126404332e-8f;

// Polynomials of least largest error on [-0.8, 0.8] (Lawson's iteration in double precision): relative error of the
// sine 4.4e-9, absolute error of the cosine 1.2e-10, both below a float's rounding. The range is a little more than
// pi/4, as the multiple of pi/2 that is nearest to a large x is found with a rounding error.
DEVICE float sine_polynomial(float r) {
  float z = r * r;
  return r + r * z * (-0.16666653192244288f + z * (0.008332070883047948f + z * -0.0001950306858770727f));
}

DEVICE float cosine_polynomial(float r) {
  float z = r * r;
  return 1.0f - 0.5f * z + z * z * (0.04166664456141105f + z * (-0.0013887251762591158f + z * 2.4424922802297896e-05f));
}

// Sine and cosine of x radians, within 1e-7 for |x| <= 1e4. Beyond, errors grow, and the results stay in [-1, 1].
DEVICE void sine_cosine(float x, float *sine, float *cosine) {
  float shifted = x * 0.6366197723675814f + rounder;
  float k = shifted - rounder;
  unsigned quadrant = bits_of(shifted);
  float r = ((x - k * half_pi_1) - k * half_pi_2) - k * half_pi_3;
  r = clamp(r, -0.8f, 0.8f);
  float s = sine_polynomial(r);
  float c = cosine_polynomial(r);
  float first = quadrant & 1u ? c : s;
  float second = quadrant & 1u ? s : c;
  *sine = float_of(bits_of(first) ^ ((quadrant & 2u) << 30));
  *cosine = float_of(bits_of(second) ^ (((quadrant + 1u) & 2u) << 30));
}

DEVICE float sine(float x) {
  float s, c;
  sine_cosine(x, &s, &c);
  return s;
}

DEVICE float cosine(float x) {
  float s, c;
  sine_cosine(x, &s, &c);
  return c;
}

// Angle x brought to [-pi, pi).
DEVICE float wrap_angle(float x) {
  float k = floor_of(x * 0.15915494309189535f + 0.5f);
  float r = ((x - k * (4.0f * half_pi_1)) - k * (4.0f * half_pi_2)) - k * (4.0f * half_pi_3);
  r = r >= pi ? r - 2.0f * pi : r;
  return r < -pi ? r + 2.0f * pi : r;
}

// e^x with a relative error of 2e-7 on [-87, 88]; 0 below, and at most e^88.3 above, so that it is never infinite.
// e^x = 2^k e^r, k the integer nearest to x / ln 2, e^r a polynomial with relative error 3.1e-9 (Lawson's iteration).
DEVICE float exponential(float x) {
  float bounded = clamp(x, -87.3f, 88.3f);
  float shifted = bounded * 1.4426950408889634f + rounder;
  float k = shifted - rounder;
  float r = (bounded - k * 0.693359375f) - k * -2.1219444170128554e-4f;
  float tail = 0.04166838805284115f + r * (0.008368716966644364f + r * 0.0013814598591379724f);
  float value = 1.0f + (r + r * r * (0.4999999344774531f + r * (0.16666520630983528f + r * tail)));
  float power = float_of((bits_of(shifted) + 127u) << 23);
  return x < -87.3f ? 0.0f : value * power;
}

DEVICE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace reagent_lite
