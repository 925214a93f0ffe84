// The one body of every kernel, over the primitives of an instruction set. Included by each isa_*.cpp.
//
// A unit is the outputs that one step works on; its weights become `vectors` vectors, each with the four channels of a quad for
// every output (the form that dot-product instructions take). Integer sums are exact, and floats are added group by group in
// ascending order with a separate multiplication and addition, part by part (see kParts): every instruction set, number of rows and split of columns gives
// the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "isa.h"

namespace edgexpert {
namespace {

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

inline void add_up(const float* sums, std::int64_t n, float* totals) {
  for (std::int64_t i = 0; i < n; ++i) totals[i] += sums[i];
}

// Pointers to the rows of group g, at column c; returns how many there are.
inline std::int64_t find_rows(const Product& p, std::int64_t g, std::int64_t c, const std::uint8_t** rows) {
  const std::int64_t count = 4 * (p.quads[g + 1] - p.quads[g]), row_bytes = p.padded * p.bits / 8;
  const std::int32_t* channels = p.channels + 4 * p.quads[g];
  const std::uint8_t* base = p.values + c * p.bits / 8;
  for (std::int64_t i = 0; i < count; ++i) rows[i] = base + channels[i] * row_bytes;
  return count;
}

struct Extent {
  std::int64_t rows, bytes;  // so many bytes of each row
};

// Rows that are needed after group g of columns [c, c + width): those of the next group, then of the next columns, then of what is
// computed after the last rows of activations.
inline Extent find_next(const Product& p, std::int64_t g, std::int64_t c, std::int64_t width, bool last_rows,
                        const std::uint8_t** rows) {
  const std::int64_t first = p.first_group(p.first_part);
  if (g + 1 < p.first_group(p.last_part)) return {find_rows(p, g + 1, c, rows), width * p.bits / 8};
  if (c + width < p.end) return {find_rows(p, first, c + width, rows), width * p.bits / 8};
  if (!p.after || !last_rows) return {0, 0};
  const Product& after = *p.after;
  return {find_rows(after, after.first_group(after.first_part), after.begin, rows), (after.end - after.begin) * p.bits / 8};
}

// Walks over rows that are needed soon while others are multiplied, so that their bytes arrive in the order of memory.
struct Prefetch {
  const std::uint8_t* const* rows;
  Extent extent;
  std::int64_t lines = 0, row = 0, offset = 0;

  inline __attribute__((always_inline)) void advance() {
    for (std::int64_t i = 0; i < lines && row < extent.rows; ++i) {
      __builtin_prefetch(rows[row] + offset, 0, 2);
      offset += 64;
      if (offset >= extent.bytes) {
        offset = 0;
        ++row;
      }
    }
  }
};

// R rows of activations times N vectors of outputs of one group, added to `to`. `weights(q, use)` calls use(n, w) with
// each of the N vectors of quad q; x[r] has four activations a quad; offset(r, n) is what an integer sum starts from. Where `step`
// adds in 16 bits, B::steps of them are added before they join the sum in 32.
template <class B, int R, int N, class Weights, class Offset>
inline __attribute__((always_inline)) void tile(Weights weights, std::int64_t quads, const std::int8_t* const* x, Offset offset,
                                                const typename B::F* scales, float* const* to) {
  using V = typename B::V;
  typename B::I total[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) total[r][n] = offset(r, n);
  const auto add_quad = [&](auto& sum, std::int64_t q) __attribute__((always_inline)) {
    decltype(V::broadcast(x[0])) four[R];
    for (int r = 0; r < R; ++r) four[r] = V::broadcast(x[r] + 4 * q);
    weights(q, [&](int n, typename B::W w) __attribute__((always_inline)) {
      for (int r = 0; r < R; ++r) sum[r][n] = B::step(sum[r][n], w, four[r]);
    });
  };
  if constexpr (requires { B::steps; }) {
    for (std::int64_t q = 0; q < quads; q += B::steps) {
      typename B::A sum[R][N];
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sum[r][n] = B::none();
      for (std::int64_t i = q; i < smaller(quads, q + B::steps); ++i) add_quad(sum, i);
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) total[r][n] = B::fold(total[r][n], sum[r][n]);
    }
  } else {
    for (std::int64_t q = 0; q < quads; ++q) add_quad(total, q);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float* at = to[r] + n * V::width;
      V::store(at, V::add(V::load(at), V::multiply(V::floats(total[r][n]), scales[n])));
    }
}

// Zero points of a unit as integers, in the order of its vectors.
template <class B>
inline void zero_points(const std::uint8_t* zeros, typename B::I* out) {
  alignas(64) std::uint8_t row[B::unit_bytes], none[B::unit_bytes] = {};
  for (int i = 0; i < B::unit_bytes; ++i) row[i] = static_cast<std::uint8_t>(zeros[2 * i] | zeros[2 * i + 1] << 4);
  const std::uint8_t* rows[4] = {row, none, none, none};
  B::unpack(rows, 0, [&](int n, typename B::W w) { out[n] = B::first(w); });
}

template <class B>
struct Quantised {
  using V = typename B::V;
  static constexpr std::int64_t unit = B::unit;

  const Product& p;
  float *sums, *totals;  // [rows, columns] of a part, and of the parts before it
  float* into = nullptr;  // that of them to which products are added
  const std::uint8_t **row_table, **padded_rows;
  std::uint8_t* padding;
  typename B::W* unpacked;

  explicit Quantised(const Product& product) : p(product) {
    std::uint8_t* at = p.scratch;
    sums = reinterpret_cast<float*>(at);
    totals = sums + kAccumulators;
    at += 2 * kAccumulators * 4;
    unpacked = reinterpret_cast<typename B::W*>(at);
    at += p.group * kColumns;
    padding = at;
    at += p.group * 64;
    row_table = reinterpret_cast<const std::uint8_t**>(at);
    padded_rows = row_table + 2 * p.group;
  }

  void run() {
    for (std::int64_t r = 0; r < p.rows; r += kRows) {
      const std::int64_t rows = smaller(kRows, p.rows - r);
      const std::int64_t block = larger(unit, kAccumulators / 2 / rows / unit * unit);
      for (std::int64_t c = p.begin; c < p.end; c += block) columns(r, rows, c, smaller(block, p.end - c));
    }
  }

  void columns(std::int64_t r, std::int64_t rows, std::int64_t c, std::int64_t width) {
    const std::int64_t units = (width + unit - 1) / unit, stride = units * unit;
    std::memset(totals, 0, rows * stride * sizeof(float));
    const std::uint8_t **now = row_table, **next = row_table + p.group;
    const std::int64_t first = p.first_group(p.first_part), last = p.first_group(p.last_part);
    std::int64_t g = first, count = g < last ? find_rows(p, g, c, now) : 0;
    for (std::int64_t part = p.first_part; part < p.last_part; ++part) {
      into = part == p.first_part ? totals : sums;
      if (into == sums) std::memset(sums, 0, rows * stride * sizeof(float));
      for (; g < p.first_group(part + 1); ++g) {
        Prefetch ahead{next, find_next(p, g, c, width, r + rows == p.rows, next)};
        // one row goes from quad to quad, more go from tile to tile
        const std::int64_t steps = larger(1, units * (rows == 1 ? count / 4 : rows / B::rows + rows % B::rows));
        ahead.lines = (ahead.extent.rows * ((ahead.extent.bytes + 63) / 64) + steps - 1) / steps;
        for (std::int64_t u = 0; u < units && count; ++u)
          group(g, r, rows, now, count, ahead, c + u * unit, u * unit, smaller(unit, width - u * unit), stride);
        const std::uint8_t** swap = now;
        now = next;
        next = swap;
        count = ahead.extent.rows;
      }
      if (into == sums) add_up(sums, rows * stride, totals);
    }
    finish(r, rows, c, width, stride);
  }

  // One unit of one group: columns from c, which are from `at` in the sums; `valid` of them exist.
  void group(std::int64_t g, std::int64_t r, std::int64_t rows, const std::uint8_t** row, std::int64_t count,
             Prefetch& ahead, std::int64_t c, std::int64_t at, std::int64_t valid, std::int64_t stride) {
    const std::int64_t quads = count / 4;
    const std::uint16_t* scale_row = p.scales + g * p.padded + c;
    const std::uint8_t* zero_row = p.zeros ? p.zeros + g * p.padded + c : nullptr;
    std::int64_t offset = at * B::bits / 8;

    if (g + 1 < p.groups)
      for (std::int64_t i = 0; i < valid; i += 32) __builtin_prefetch(scale_row + p.padded + i, 0, 3);

    // The last unit of a row is copied, so that no load goes beyond the row.
    alignas(64) std::uint16_t scale_copy[unit];
    alignas(64) std::uint8_t zero_copy[unit];
    if (valid < unit) {
      std::memset(scale_copy, 0, sizeof scale_copy);
      std::memcpy(scale_copy, scale_row, valid * sizeof(std::uint16_t));
      scale_row = scale_copy;
      if (zero_row) {
        std::memset(zero_copy, 0, sizeof zero_copy);
        std::memcpy(zero_copy, zero_row, valid);
        zero_row = zero_copy;
      }
      std::memset(padding, 0, count * B::unit_bytes);
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(padding + i * B::unit_bytes, row[i] + offset, valid * B::bits / 8);
        padded_rows[i] = padding + i * B::unit_bytes;
      }
      row = padded_rows;
      offset = 0;
    }
    typename B::F scales[B::vectors];
    B::scales(scale_row, scales);
    typename B::I zeros[B::vectors];
    if (zero_row) zero_points<B>(zero_row, zeros);
    const std::int64_t first = 4 * p.quads[g];

    if (rows == 1) {
      const std::int8_t* x = static_cast<const std::int8_t*>(p.x[r]) + first;
      const std::int32_t sum = -p.sums[r][g];
      float* to = into + at;
      const auto weights = [&](std::int64_t q, auto use) __attribute__((always_inline)) {
        ahead.advance();
        B::unpack(row + 4 * q, offset, use);
      };
      const auto start = [&](int, int n) __attribute__((always_inline)) {
        return zero_row ? V::times(zeros[n], sum) : V::integer(B::zero * sum);
      };
      tile<B, 1, B::vectors>(weights, quads, &x, start, scales, &to);
      return;
    }
    for (std::int64_t q = 0; q < quads; ++q)
      B::unpack(row + 4 * q, offset, [&](int n, typename B::W w) __attribute__((always_inline)) { unpacked[q * B::vectors + n] = w; });
    const typename B::I* own_zeros = zero_row ? zeros : nullptr;
    std::int64_t i = 0;
    for (; i + B::rows <= rows; i += B::rows) {
      ahead.advance();
      tiles<B::rows>(g, r + i, i, first, quads, own_zeros, scales, at, stride);
    }
    for (; i < rows; ++i) {
      ahead.advance();
      tiles<1>(g, r + i, i, first, quads, own_zeros, scales, at, stride);
    }
  }

  template <int R>
  void tiles(std::int64_t g, std::int64_t r, std::int64_t i, std::int64_t first, std::int64_t quads, const typename B::I* zeros,
             const typename B::F* scales, std::int64_t at, std::int64_t stride) {
    constexpr int N = R == 1 ? B::vectors : B::columns;
    const std::int8_t* x[R];
    float* to[R];
    std::int32_t start[R];
    for (int k = 0; k < R; ++k) {
      x[k] = static_cast<const std::int8_t*>(p.x[r + k]) + first;
      to[k] = into + (i + k) * stride + at;
      start[k] = zeros ? -p.sums[r + k][g] : -B::zero * p.sums[r + k][g];
    }
#pragma GCC unroll 1
    for (int n = 0; n < B::vectors; n += N) {
      const typename B::W* from = unpacked + n;
      const auto weights = [=](std::int64_t q, auto use) __attribute__((always_inline)) {
        for (int m = 0; m < N; ++m) use(m, from[q * B::vectors + m]);
      };
      const auto offset = [&](int k, int m) __attribute__((always_inline)) {
        return zeros ? V::times(zeros[n + m], start[k]) : V::integer(start[k]);
      };
      tile<B, R, N>(weights, quads, x, offset, scales + n, to);
      for (int k = 0; k < R; ++k) to[k] += N * V::width;
    }
  }

  void finish(std::int64_t r, std::int64_t rows, std::int64_t c, std::int64_t width, std::int64_t stride) const {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t at = 0; at < width; at += unit) {
        alignas(64) float y[unit];
        B::store(totals + i * stride + at, y);
        const float scale = p.x_scales ? p.x_scales[r + i] : 1.0f;
        const std::int64_t n = smaller(unit, p.outputs - c - at);
        float* out = p.out + (r + i) * p.out_stride + c + at;
        if (p.bias) {
          for (std::int64_t k = 0; k < n; ++k) out[k] = y[k] * scale + p.bias[c + at + k];
        } else {
          for (std::int64_t k = 0; k < n; ++k) out[k] = y[k] * scale;
        }
      }
  }
};

// bfloat16 weights and float activations, in units of 32 outputs.
template <class V>
void product16(const Product& p) {
  constexpr int unit = 32, N = unit / V::width;
  for (std::int64_t r = 0; r < p.rows; ++r) {
    const float* x = static_cast<const float*>(p.x[r]);
    const std::int64_t block = kAccumulators;
    for (std::int64_t c = p.begin; c < p.end; c += block) {
      const std::int64_t width = smaller(block, p.end - c);
      float *sums = reinterpret_cast<float*>(p.scratch), *totals = sums + kAccumulators;
      std::memset(totals, 0, width * sizeof(float));
      for (std::int64_t part = p.first_part; part < p.last_part; ++part) {
        std::memset(sums, 0, width * sizeof(float));
        for (std::int64_t g = p.first_group(part); g < p.first_group(part + 1); ++g)
          for (std::int64_t at = 0; at < width; at += unit) {
            typename V::F sum[N];
            for (int n = 0; n < N; ++n) sum[n] = V::load(sums + at + n * V::width);
            for (std::int64_t i = 4 * p.quads[g]; i < 4 * p.quads[g + 1]; ++i) {
              const std::uint8_t* w = p.values + (p.channels[i] * p.padded + c + at) * 2;
              const auto factor = V::value(x[i]);
              for (int n = 0; n < N; ++n) sum[n] = V::add(sum[n], V::multiply(factor, V::bfloat16(w + n * V::width * 2)));
            }
            for (int n = 0; n < N; ++n) V::store(sums + at + n * V::width, sum[n]);
          }
        add_up(sums, width, totals);
      }
      float* out = p.out + r * p.out_stride + c;
      for (std::int64_t k = 0; k < smaller(width, p.outputs - c); ++k) out[k] = p.bias ? totals[k] + p.bias[c + k] : totals[k];
    }
  }
}

template <class V>
void product(const Product& p) {
  if (p.bits == 4) {
    Quantised<typename V::Four>(p).run();
  } else if (p.bits == 8) {
    Quantised<typename V::Eight>(p).run();
  } else {
    product16<V>(p);
  }
}

void join(const float* sums, std::int64_t stride, std::int64_t n, float scale, const float* bias, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    float total = sums[i];
    for (std::int64_t part = 1; part < kParts; ++part) total += sums[part * stride + i];
    out[i] = bias ? total * scale + bias[i] : total * scale;
  }
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer, half to even

float quantise(const float* x, std::int64_t n, std::int8_t* q) {
  std::int32_t largest = 0;  // compared as bits, so that no NaN of x is passed over
  for (std::int64_t i = 0; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float most;
  std::memcpy(&most, &largest, 4);
  if (largest >= 0x7f800000 || most < 1e-30f) {  // what is no finite number makes all outputs NaN
    std::memset(q, 0, n);
    return largest >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const float factor = 127.0f / most;
  for (std::int64_t i = 0; i < n; ++i) q[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(x[i] * factor + kRound - kRound));
  return most / 127.0f;
}

// e^x by 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error below 2e-7.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = x * 1.44269504f + kRound - kRound;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n == n ? n : 0.0f) + 127) << 23);  // p is NaN where x is
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <class F>
inline void activate_with(F f, bool gated, const float* y, std::int64_t width, float* out) {
  if (gated) {
    for (std::int64_t i = 0; i < width; ++i) out[i] = f(y[i]) * y[width + i];
  } else {
    for (std::int64_t i = 0; i < width; ++i) out[i] = f(y[i]);
  }
}

void activate(Activation activation, bool gated, const float* y, std::int64_t width, float* out) {
  switch (activation) {
    case Activation::silu:
      return activate_with([](float v) { return v * sigmoid(v); }, gated, y, width, out);
    case Activation::gelu:
      return activate_with([](float v) { return 0.5f * v * (1.0f + erff(v * 0.707106781f)); }, gated, y, width, out);
    case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 is the logistic function of 2 u
      return activate_with([](float v) { return v * sigmoid(1.59576912f * (v + 0.044715f * (v * v * v))); }, gated, y, width, out);
    case Activation::relu:
      return activate_with([](float v) { return v < 0.0f ? 0.0f : v; }, gated, y, width, out);
    case Activation::identity:
      return activate_with([](float v) { return v; }, gated, y, width, out);
  }
}

void add_scaled(float weight, const float* y, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] += weight * y[i];
}

}  // namespace
}  // namespace edgexpert
