// 4-bit weights in symmetric groups of at most 32 channels on AVX2: the common case, and twice as fast as the general body.
//
// Two channels at a time: the nibbles of two rows are interleaved bytewise, and vpmaddubsw adds the two products of an output in 16
// bits. The sums wrap around, but what is left when 8 * sum(x) is taken off, sum((q - 8) x), fits again: |.| <= 8 * 127 * 32 = 32512.
// So a group needs no widening before its end.
#pragma once

#include <immintrin.h>

#include "matmul.h"

namespace edgexpert {
namespace {

class FourBits {
 public:
  static constexpr std::int64_t unit = 128, unit_bytes = 64, vectors = 8, most_channels = 32;

  static bool fits(const Product& p) { return p.bits == 4 && !p.zeros && p.group <= most_channels; }

  explicit FourBits(const Product& product)
      : p(product), accumulators(reinterpret_cast<float*>(p.scratch)), row_bytes(p.padded / 2) {}

  // Columns [begin, end), a multiple of `unit` wide.
  void run(std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = 0; r < p.rows; r += kRows) {
      const std::int64_t rows = smaller(kRows, p.rows - r);
      const std::int64_t block = larger(unit, kAccumulators / 2 / rows / unit * unit);
      for (std::int64_t c = begin; c < end; c += block) columns(r, rows, c, smaller(block, end - c));
    }
  }

 private:
  // Asks for the rows of the next group, in the order of memory, while this one is multiplied: two cache lines a step.
  struct Ahead {
    const std::uint8_t* rows[most_channels];
    std::int64_t count = 0, width = 0, row = 0;
    const std::uint8_t *line = nullptr, *end = nullptr;

    void begin(std::int64_t rows_ahead) {
      count = rows_ahead;
      row = -1;
      next();
    }
    __attribute__((noinline)) void next() {
      if (row < count) ++row;
      line = rows[row < count ? row : 0];  // beyond the last row: lines that are there already
      end = line + width;
    }
  };

  std::int64_t find(std::int64_t g, std::int64_t c, const std::uint8_t** rows) const {
    const std::int32_t* channels = p.channels + 4 * p.quads[g];
    const std::int64_t count = 4 * (p.quads[g + 1] - p.quads[g]);
    for (std::int64_t i = 0; i < count; ++i) rows[i] = p.values + channels[i] * row_bytes + c / 2;
    return count;
  }

  void columns(std::int64_t r, std::int64_t rows, std::int64_t c, std::int64_t width) {
    std::memset(accumulators, 0, rows * width * sizeof(float));
    Ahead ahead;
    ahead.width = width / 2;
    const std::uint8_t* now[most_channels];
    std::int64_t ahead_count = p.groups ? find(0, c, ahead.rows) : 0;
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const std::int64_t count = ahead_count;
      std::memcpy(now, ahead.rows, count * sizeof(now[0]));
      ahead_count = g + 1 < p.groups ? find(g + 1, c, ahead.rows) : 0;
      ahead.begin(ahead_count);
      const std::int64_t pairs = count / 2;
      const std::uint16_t* scales = p.scales + g * p.padded + c;
      const std::int64_t first = 4 * p.quads[g];
      for (std::int64_t at = 0; at < width && count; at += unit) {
        for (std::int64_t i = 0; i < unit; i += 32)
          _mm_prefetch(reinterpret_cast<const char*>(scales + p.padded + at + i), _MM_HINT_T0);
        if (rows == 1) {
          multiply(now, at / 2, static_cast<const std::int8_t*>(p.x[r]) + first, pairs, ahead, p.sums[r][g], scales + at,
                   accumulators + at);
          continue;
        }
        alignas(32) __m256i unpacked[most_channels / 2 * vectors];
        unpack(now, at / 2, pairs, ahead, unpacked);
        alignas(32) float unit_scales[unit];
        for (std::int64_t i = 0; i < unit; i += 8) _mm256_store_ps(unit_scales + i, eight(scales + at + i));
        std::int64_t i = 0;
        for (; i + 2 <= rows; i += 2) {
          const std::int8_t* x[2];
          std::int32_t x_sums[2];
          float* to[2];
          for (int k = 0; k < 2; ++k) {
            x[k] = static_cast<const std::int8_t*>(p.x[r + i + k]) + first;
            x_sums[k] = p.sums[r + i + k][g];
            to[k] = accumulators + (i + k) * width + at;
          }
          for (int half = 0; half < 2; ++half) multiply_two(unpacked + 4 * half, x, pairs, x_sums, unit_scales, to, 64 * half);
        }
        if (i < rows)
          multiply_one(unpacked, static_cast<const std::int8_t*>(p.x[r + i]) + first, pairs, p.sums[r + i][g], unit_scales,
                       accumulators + i * width + at);
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const float scale = p.x_scales[r + i];
      const float* y = accumulators + i * width;
      float* out = p.out + (r + i) * p.out_stride + c;
      const std::int64_t n = smaller(width, p.outputs - c);
      for (std::int64_t k = 0; k < n; ++k) out[k] = p.bias ? y[k] * scale + p.bias[c + k] : y[k] * scale;
    }
  }

  static inline __attribute__((always_inline)) __m256i load(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }

  // Two int8 activations in every 16-bit lane.
  static inline __attribute__((always_inline)) __m256i two(const std::int8_t* x) {
    std::int16_t both;
    std::memcpy(&both, x, 2);
    return _mm256_set1_epi16(both);
  }

  static inline __attribute__((always_inline)) __m256i add(__m256i sum, __m256i w, __m256i xs) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, xs));
    asm volatile("" : "+x"(sum));  // left free, gcc computes many products before it adds the first, and spills them
    return sum;
  }

  static inline __attribute__((always_inline)) void ask(Ahead& ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead.line), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(ahead.line + 64), _MM_HINT_T0);
    ahead.line += 128;
    if (ahead.line >= ahead.end) ahead.next();
  }

  // Adds a unit of a group for one row of activations whose sum over the group is x_sum. These loops are functions of their own so
  // that the sums stay in registers.
  static __attribute__((noinline)) void multiply(const std::uint8_t* const* rows, std::int64_t offset, const std::int8_t* x,
                                                 std::int64_t pairs, Ahead& ahead, std::int32_t x_sum,
                                                 const std::uint16_t* scales, float* accumulators) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{};
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      ask(ahead);
      const std::uint8_t *a = rows[2 * pair] + offset, *b = rows[2 * pair + 1] + offset;
      const __m256i xs = two(x + 2 * pair);
      __m256i both = _mm256_unpacklo_epi8(load(a), load(b));
      s0 = add(s0, _mm256_and_si256(both, nibble), xs);
      s1 = add(s1, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), xs);
      both = _mm256_unpackhi_epi8(load(a), load(b));
      s2 = add(s2, _mm256_and_si256(both, nibble), xs);
      s3 = add(s3, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), xs);
      both = _mm256_unpacklo_epi8(load(a + 32), load(b + 32));
      s4 = add(s4, _mm256_and_si256(both, nibble), xs);
      s5 = add(s5, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), xs);
      both = _mm256_unpackhi_epi8(load(a + 32), load(b + 32));
      s6 = add(s6, _mm256_and_si256(both, nibble), xs);
      s7 = add(s7, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), xs);
    }
    const __m256i zero = _mm256_set1_epi16(static_cast<std::int16_t>(8 * x_sum));
    finish(s0, s1, zero, scales, accumulators);
    finish(s2, s3, zero, scales + 16, accumulators + 16);
    finish(s4, s5, zero, scales + 64, accumulators + 64);
    finish(s6, s7, zero, scales + 80, accumulators + 80);
  }

  // The nibbles of two rows side by side, eight vectors a pair: a 16-bit lane has an output of both.
  static __attribute__((noinline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, std::int64_t pairs,
                                               Ahead& ahead, __m256i* out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      ask(ahead);
      for (int half = 0; half < 2; ++half, out += 4) {
        const __m256i a = load(rows[2 * pair] + offset + 32 * half), b = load(rows[2 * pair + 1] + offset + 32 * half);
        const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
        out[0] = _mm256_and_si256(low, nibble);
        out[1] = _mm256_and_si256(_mm256_srli_epi16(low, 4), nibble);
        out[2] = _mm256_and_si256(high, nibble);
        out[3] = _mm256_and_si256(_mm256_srli_epi16(high, 4), nibble);
      }
    }
  }

  static __attribute__((noinline)) void multiply_one(const __m256i* w, const std::int8_t* x, std::int64_t pairs, std::int32_t x_sum,
                                                     const float* scales, float* accumulators) {
    __m256i s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{};
    for (std::int64_t pair = 0; pair < pairs; ++pair, w += vectors) {
      const __m256i xs = two(x + 2 * pair);
      s0 = add(s0, w[0], xs);
      s1 = add(s1, w[1], xs);
      s2 = add(s2, w[2], xs);
      s3 = add(s3, w[3], xs);
      s4 = add(s4, w[4], xs);
      s5 = add(s5, w[5], xs);
      s6 = add(s6, w[6], xs);
      s7 = add(s7, w[7], xs);
    }
    const __m256i zero = _mm256_set1_epi16(static_cast<std::int16_t>(8 * x_sum));
    finish(s0, s1, zero, scales, accumulators);
    finish(s2, s3, zero, scales + 16, accumulators + 16);
    finish(s4, s5, zero, scales + 64, accumulators + 64);
    finish(s6, s7, zero, scales + 80, accumulators + 80);
  }

  // Half a unit, from column `at`, for two rows of activations: each vector of weights is loaded once for both.
  static __attribute__((noinline)) void multiply_two(const __m256i* w, const std::int8_t* const* x, std::int64_t pairs,
                                                     const std::int32_t* x_sums, const float* scales, float* const* accumulators,
                                                     std::int64_t at) {
    __m256i a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    const std::int8_t *xa = x[0], *xb = x[1];
    for (std::int64_t pair = 0; pair < pairs; ++pair, w += vectors) {
      const __m256i as = two(xa + 2 * pair), bs = two(xb + 2 * pair);
      __m256i weights = w[0];
      a0 = add(a0, weights, as);
      b0 = add(b0, weights, bs);
      weights = w[1];
      a1 = add(a1, weights, as);
      b1 = add(b1, weights, bs);
      weights = w[2];
      a2 = add(a2, weights, as);
      b2 = add(b2, weights, bs);
      weights = w[3];
      a3 = add(a3, weights, as);
      b3 = add(b3, weights, bs);
    }
    const __m256i zero_a = _mm256_set1_epi16(static_cast<std::int16_t>(8 * x_sums[0]));
    finish(a0, a1, zero_a, scales + at, accumulators[0] + at);
    finish(a2, a3, zero_a, scales + at + 16, accumulators[0] + at + 16);
    const __m256i zero_b = _mm256_set1_epi16(static_cast<std::int16_t>(8 * x_sums[1]));
    finish(b0, b1, zero_b, scales + at, accumulators[1] + at);
    finish(b2, b3, zero_b, scales + at + 16, accumulators[1] + at + 16);
  }

  // accumulators += (sums - zero) * scales. The sums are of even and odd outputs of two runs of 16, the second 32 further on.
  template <class Scale>
  static inline __attribute__((always_inline)) void finish(__m256i even, __m256i odd, __m256i zero, const Scale* scales,
                                                           float* accumulators) {
    even = _mm256_sub_epi16(even, zero);
    odd = _mm256_sub_epi16(odd, zero);
    const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
    scale_eight(_mm256_castsi256_si128(low), scales, accumulators);
    scale_eight(_mm256_castsi256_si128(high), scales + 8, accumulators + 8);
    scale_eight(_mm256_extracti128_si256(low, 1), scales + 32, accumulators + 32);
    scale_eight(_mm256_extracti128_si256(high, 1), scales + 40, accumulators + 40);
  }

  static inline __m256 eight(const std::uint16_t* scales) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  }
  static inline __m256 eight(const float* scales) { return _mm256_loadu_ps(scales); }

  template <class Scale>
  static inline __attribute__((always_inline)) void scale_eight(__m128i sums, const Scale* scales, float* accumulators) {
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(sums)), eight(scales));
    _mm256_storeu_ps(accumulators, _mm256_add_ps(_mm256_loadu_ps(accumulators), product));
  }

  const Product& p;
  float* accumulators;
  std::int64_t row_bytes;
};

// The general body takes what is left: other formats, and the columns behind the last whole unit.
template <class V>
void product_avx2(const Product& p) {
  if (!FourBits::fits(p)) return product<V>(p);
  const std::int64_t end = p.begin + (p.end - p.begin) / FourBits::unit * FourBits::unit;
  FourBits(p).run(p.begin, end);
  if (end == p.end) return;
  Product rest = p;
  rest.begin = end;
  product<V>(rest);
}

}  // namespace
}  // namespace edgexpert
