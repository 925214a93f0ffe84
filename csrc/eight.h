// Eight floats, the vector of dense_isa.h: one register with AVX, two of four floats elsewhere. A vector type of eight would do
// everywhere, but gcc keeps it in memory where no register holds it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors go from function to function in the files of one instruction set alone

namespace edgexpert {
namespace {

// e^x for x <= 0, and 0 from -87 down; the relative error is below 3e-7 and half of what rounding x may do.
template <class Floats, class Integers>
inline __attribute__((always_inline)) Floats exp_negative_of(Floats x) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the last bits
  const Floats lowest = Floats{} - 87.0f;
  const Floats y = x > lowest ? x : lowest;
  const Floats shifted = y * 1.44269504f + round;
  const Floats r = y - (shifted - round) * 0.693147181f;
  Floats p = r * 8.36970920e-3f + 4.19175367e-2f;
  p = p * r + 1.66665182e-1f;
  p = p * r + 4.99989948e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return y == lowest ? Floats{} : (Floats)((Integers)p + ((Integers)shifted << 23));  // 2^n times p
}

// Elements I of a and b side by side.
template <class Integers, int... I, class Floats>
inline __attribute__((always_inline)) Floats shuffle(Floats a, Floats b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Integers{I...});
#endif
}

#ifdef __AVX__

constexpr int kSums = 8;  // vectors of eight sums that registers hold beside what is added to them

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t EightIntegers __attribute__((vector_size(32), aligned(4), may_alias));

// Not by memcpy, which gcc 12 takes through integer registers.
inline Eight eight(const float* p) { return *reinterpret_cast<const Eight*>(p); }
inline void store(float* p, Eight x) { *reinterpret_cast<Eight*>(p) = x; }
inline Eight exp_negative(Eight x) { return exp_negative_of<Eight, EightIntegers>(x); }
inline Eight larger_of(Eight a, Eight b) { return a > b ? a : b; }

// Two loads are all that a cycle has, but gcc would read x from memory again for each use.
inline Eight in_register(Eight x) {
  asm("" : "+x"(x));
  return x;
}

template <int... I>
inline __attribute__((always_inline)) Eight pick(Eight a, Eight b) {
  return shuffle<EightIntegers, I...>(a, b);
}

// sum_lanes of each of eight vectors, four of them side by side in a half of the register.
inline __attribute__((always_inline)) Eight sum_lanes(const Eight* x) {
  const auto halves = [=](int i) {
    return pick<0, 1, 2, 3, 8, 9, 10, 11>(x[i], x[i + 4]) + pick<4, 5, 6, 7, 12, 13, 14, 15>(x[i], x[i + 4]);
  };
  const auto quarters = [](Eight a, Eight b) {
    return pick<0, 1, 8, 9, 4, 5, 12, 13>(a, b) + pick<2, 3, 10, 11, 6, 7, 14, 15>(a, b);
  };
  const Eight a = quarters(halves(0), halves(1)), b = quarters(halves(2), halves(3));
  return pick<0, 2, 8, 10, 4, 6, 12, 14>(a, b) + pick<1, 3, 9, 11, 5, 7, 13, 15>(a, b);
}

// out[c * stride + r] = rows[r][at + c] for eight rows r and columns c.
inline __attribute__((always_inline)) void transpose_eight(const float* const* rows, std::int64_t at, float* out, std::int64_t stride) {
  const auto put = [=](std::int64_t c, Eight x) { store(out + c * stride, x); };
  const auto four_columns = [=](std::int64_t c, Eight w, Eight x, Eight y, Eight z) __attribute__((always_inline)) {
    const Eight wx = pick<0, 8, 1, 9, 4, 12, 5, 13>(w, x), yz = pick<0, 8, 1, 9, 4, 12, 5, 13>(y, z);
    const Eight WX = pick<2, 10, 3, 11, 6, 14, 7, 15>(w, x), YZ = pick<2, 10, 3, 11, 6, 14, 7, 15>(y, z);
    put(c, pick<0, 1, 8, 9, 4, 5, 12, 13>(wx, yz));
    put(c + 1, pick<2, 3, 10, 11, 6, 7, 14, 15>(wx, yz));
    put(c + 2, pick<0, 1, 8, 9, 4, 5, 12, 13>(WX, YZ));
    put(c + 3, pick<2, 3, 10, 11, 6, 7, 14, 15>(WX, YZ));
  };
  Eight low[4], high[4];  // halves of rows k and k + 4
  for (int k = 0; k < 4; ++k) {
    const Eight x = eight(rows[k] + at), y = eight(rows[k + 4] + at);
    low[k] = pick<0, 1, 2, 3, 8, 9, 10, 11>(x, y);
    high[k] = pick<4, 5, 6, 7, 12, 13, 14, 15>(x, y);
  }
  four_columns(0, low[0], low[1], low[2], low[3]);
  four_columns(4, high[0], high[1], high[2], high[3]);
}

#else

#ifdef __aarch64__
constexpr int kSums = 8;
#else
constexpr int kSums = 4;
#endif

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef std::int32_t FourIntegers __attribute__((vector_size(16), aligned(4), may_alias));

struct Eight {
  Four low, high;
  float operator[](int i) const { return i < 4 ? low[i] : high[i - 4]; }
};

inline Four four(const float* p) { return *reinterpret_cast<const Four*>(p); }
inline void store(float* p, Four x) { *reinterpret_cast<Four*>(p) = x; }
inline Eight eight(const float* p) { return {four(p), four(p + 4)}; }
inline void store(float* p, Eight x) {
  store(p, x.low);
  store(p + 4, x.high);
}

inline Eight operator+(Eight a, Eight b) { return {a.low + b.low, a.high + b.high}; }
inline Eight operator*(Eight a, Eight b) { return {a.low * b.low, a.high * b.high}; }
inline Eight operator-(Eight a, float b) { return {a.low - b, a.high - b}; }
inline Eight operator*(Eight a, float b) { return {a.low * b, a.high * b}; }
inline Eight operator*(float a, Eight b) { return b * a; }
inline Eight& operator+=(Eight& a, Eight b) { return a = a + b; }

inline Eight exp_negative(Eight x) {
  return {exp_negative_of<Four, FourIntegers>(x.low), exp_negative_of<Four, FourIntegers>(x.high)};
}
inline Four larger_of(Four a, Four b) { return a > b ? a : b; }
inline Eight larger_of(Eight a, Eight b) { return {larger_of(a.low, b.low), larger_of(a.high, b.high)}; }
inline Eight in_register(Eight x) { return x; }

template <int... I>
inline __attribute__((always_inline)) Four pick(Four a, Four b) {
  return shuffle<FourIntegers, I...>(a, b);
}

// sum_lanes of each of eight vectors.
inline __attribute__((always_inline)) Eight sum_lanes(const Eight* x) {
  const auto two = [](Eight x, Eight y) {
    const Four a = x.low + x.high, b = y.low + y.high;
    return pick<0, 1, 4, 5>(a, b) + pick<2, 3, 6, 7>(a, b);
  };
  const auto sums = [=](const Eight* x) {
    const Four a = two(x[0], x[1]), b = two(x[2], x[3]);
    return pick<0, 2, 4, 6>(a, b) + pick<1, 3, 5, 7>(a, b);
  };
  return {sums(x), sums(x + 4)};
}

// out[c * stride + r] = rows[r][at + c] for eight rows r and columns c.
inline __attribute__((always_inline)) void transpose_eight(const float* const* rows, std::int64_t at, float* out, std::int64_t stride) {
  for (int r = 0; r < 8; r += 4)
    for (int c = 0; c < 8; c += 4) {
      const auto row = [=](int k) { return four(rows[r + k] + at + c); };
      const auto put = [=](int k, Four x) { store(out + (c + k) * stride + r, x); };
      const Four ab = pick<0, 4, 1, 5>(row(0), row(1)), cd = pick<0, 4, 1, 5>(row(2), row(3));
      const Four AB = pick<2, 6, 3, 7>(row(0), row(1)), CD = pick<2, 6, 3, 7>(row(2), row(3));
      put(0, pick<0, 1, 4, 5>(ab, cd));
      put(1, pick<2, 3, 6, 7>(ab, cd));
      put(2, pick<0, 1, 4, 5>(AB, CD));
      put(3, pick<2, 3, 6, 7>(AB, CD));
    }
}

#endif

// The first n < 8 of eight floats; the others are 0.
inline Eight first_of(const float* p, std::int64_t n) {
  Eight x{};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
}

inline float sum_lanes(Eight x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

}  // namespace
}  // namespace edgexpert
