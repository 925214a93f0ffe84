// 4-bit weights in symmetric groups of at most 32 channels on AVX2: the common case, and several times as fast as the general body.
//
// vpmaddubsw adds the products of two channels in 16 bits, and no group needs wider sums: sum((q - 8) x) is at most 8 * 127 * 32 =
// 32512. For one row of activations two channels are interleaved bytewise as they are read, and their sums, which may wrap around on
// the way, have 8 * sum(x) taken off in the end. For more rows the weights of a group are unpacked once, four channels in a 32-bit
// lane, and each row starts from what is to be taken off.
#pragma once

#include <immintrin.h>

#include "matmul.h"

namespace edgexpert {
namespace {

class FourBits {
 public:
  static constexpr std::int64_t unit = 128, vectors = 16, most_channels = 32, most_rows = 32;

  static bool fits(const Product& p) { return p.bits == 4 && !p.zeros && p.group <= most_channels; }

  explicit FourBits(const Product& product) : p(product) {
    sums = reinterpret_cast<float*>(p.scratch);
    totals = sums + kAccumulators;
    starts = reinterpret_cast<std::int32_t*>(totals + kAccumulators);
    activations = reinterpret_cast<std::int8_t*>(starts + p.groups * most_rows);
  }

  // Columns [begin, end), a multiple of `unit` wide.
  void run(std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = 0; r < p.rows; r += most_rows) {
      const std::int64_t rows = smaller(most_rows, p.rows - r);
      const std::int64_t block = larger(unit, kAccumulators / rows / unit * unit);
      if (rows > 1) pack(r, rows);
      for (std::int64_t c = begin; c < end; c += block) columns(r, rows, c, smaller(block, end - c));
    }
  }

 private:
  // Asks for rows that are needed soon, in the order of memory, while others are multiplied: two cache lines a step.
  struct Ahead {
    const std::uint8_t* rows[most_channels];
    Extent extent{};
    std::int64_t row = 0;
    const std::uint8_t *line = nullptr, *end = nullptr;

    void begin() {
      row = -1;
      next();
    }
    __attribute__((noinline)) void next() {
      if (row < extent.rows) ++row;
      line = rows[row < extent.rows ? row : 0];  // beyond the last row: lines that are there already
      end = line + extent.bytes;
    }
  };

  // Copies the rows' activations group by group, and finds what their sums start from: -8 x in the two 16-bit halves of a lane.
  void pack(std::int64_t r, std::int64_t rows) {
    for (std::int64_t g = p.first_group(p.first_part); g < p.first_group(p.last_part); ++g) {
      const std::int64_t first = 4 * p.quads[g], count = 4 * p.quads[g + 1] - first;
      for (std::int64_t i = 0; i < rows; ++i) {
        std::int8_t* to = activations + (g * most_rows + i) * most_channels;
        const std::int8_t* from = static_cast<const std::int8_t*>(p.x[r + i]) + first;
        if (count == most_channels) {
          std::memcpy(to, from, most_channels);
        } else {
          std::memset(to, 0, most_channels);
          std::memcpy(to, from, count);
        }
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load(reinterpret_cast<const std::uint8_t*>(to)));
        __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        sum = _mm_add_epi16(sum, _mm_srli_si128(sum, 8));
        sum = _mm_add_epi16(sum, _mm_srli_si128(sum, 4));
        starts[g * most_rows + i] = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), _mm_slli_epi16(sum, 3)));
      }
    }
  }

  void columns(std::int64_t r, std::int64_t rows, std::int64_t c, std::int64_t width) {
    const std::int64_t last = p.first_group(p.last_part);
    Ahead ahead;
    std::int64_t g = p.first_group(p.first_part);
    ahead.extent.rows = g < last ? find_rows(p, g, c, ahead.rows) : 0;
    for (std::int64_t part = p.first_part; part < p.last_part; ++part) {
      float* const to = part == p.first_part ? totals : sums;  // the first part need not be added to nothing
      std::memset(to, 0, rows * width * sizeof(float));
      for (; g < p.first_group(part + 1); ++g) {
        const std::uint8_t* now[most_channels];
        const std::int64_t count = ahead.extent.rows;
        std::memcpy(now, ahead.rows, count * sizeof(now[0]));
        ahead.extent = find_next(p, g, c, width, r + rows == p.rows, ahead.rows);
        ahead.begin();
        const std::uint16_t* scales = p.scales + g * p.padded + c;
        for (std::int64_t at = 0; at < width && count; at += unit) {
          for (std::int64_t i = 0; i < unit; i += 32)
            _mm_prefetch(reinterpret_cast<const char*>(scales + p.padded + at + i), _MM_HINT_T0);
          if (rows == 1) {
            multiply(now, at / 2, static_cast<const std::int8_t*>(p.x[r]) + 4 * p.quads[g], count / 2, ahead, p.sums[r][g],
                     scales + at, to + at);
          } else {
            multiply_rows(now, at / 2, count / 4, ahead, g, rows, scales + at, to + at, width);
          }
        }
      }
      if (to == sums) add_up(sums, rows * width, totals);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      if (rows > 1)
        for (std::int64_t at = 0; at < width; at += unit / 2) in_order(totals + i * width + at);
      const float scale = p.x_scales ? p.x_scales[r + i] : 1.0f;
      const float* y = totals + i * width;
      float* out = p.out + (r + i) * p.out_stride + c;
      const std::int64_t n = smaller(width, p.outputs - c);
      for (std::int64_t k = 0; k < n; ++k) out[k] = p.bias ? y[k] * scale + p.bias[c + k] : y[k] * scale;
    }
  }

  // Adds a unit of a group, for several rows of activations, to their sums, `stride` apart.
  void multiply_rows(const std::uint8_t* const* now, std::int64_t offset, std::int64_t quads, Ahead& ahead, std::int64_t g,
                     std::int64_t rows, const std::uint16_t* scales, float* to, std::int64_t stride) const {
    alignas(32) __m256i weights[most_channels / 4 * vectors];
    alignas(32) __m256 unit_scales[vectors];
    unpack(now, offset, quads, ahead, weights);
    spread(scales, unit_scales);
    const std::int8_t* x = activations + g * most_rows * most_channels;
    const std::int32_t* start = starts + g * most_rows;
    for (std::int64_t i = 0; i < rows; i += 3)
      for (std::int64_t n = 0; n < vectors; n += 4) {
        const auto tile = rows - i == 1 ? multiply_tile<1> : rows - i == 2 ? multiply_tile<2> : multiply_tile<3>;
        tile(weights + n, x + i * most_channels, quads, start + i, unit_scales + n, to + i * stride + 8 * n, stride);
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

  // sum + w xs in 16 bits. As instructions: gcc computes many products before it adds the first and spills them, or copies each sum.
  static inline __attribute__((always_inline)) __m256i add(__m256i sum, __m256i w, __m256i xs) {
    __m256i product;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(xs));
    return sum;
  }

  // The same with four activations from memory in every 32-bit lane: three rows of sums leave no register for them.
  static inline __attribute__((always_inline)) __m256i add(__m256i sum, __m256i w, const std::int8_t* x) {
    __m256i product;
    asm volatile("vpbroadcastd %3, %1\n\tvpmaddubsw %1, %2, %1\n\tvpaddw %1, %0, %0"
                 : "+x"(sum), "=&x"(product)
                 : "x"(w), "m"(*reinterpret_cast<const std::int8_t(*)[4]>(x)));
    return sum;
  }

  static inline __attribute__((always_inline)) void ask(Ahead& ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead.line), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(ahead.line + 64), _MM_HINT_T1);
    ahead.line += 128;
    if (ahead.line >= ahead.end) ahead.next();
  }

  // Adds a unit of a group for one row of activations whose sum over the group is x_sum. The loops are functions of their own so
  // that their sums stay in registers.
  static __attribute__((noinline)) void multiply(const std::uint8_t* const* rows, std::int64_t offset, const std::int8_t* x,
                                                 std::int64_t pairs, Ahead& ahead, std::int32_t x_sum,
                                                 const std::uint16_t* scales, float* to) {
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
    finish(s0, s1, zero, scales, to);
    finish(s2, s3, zero, scales + 16, to + 16);
    finish(s4, s5, zero, scales + 64, to + 64);
    finish(s6, s7, zero, scales + 80, to + 80);
  }

  // The weights of four channels in each 32-bit lane, 16 vectors a quad. A vector has every other output of two runs of eight, the
  // second 32 further on: eight vectors, of even and odd outputs in turn, make half a unit.
  static __attribute__((noinline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, std::int64_t quads,
                                               Ahead& ahead, __m256i* out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (std::int64_t quad = 0; quad < quads; ++quad, rows += 4) {
      ask(ahead);
      ask(ahead);
      for (int half = 0; half < 2; ++half) {
        const std::int64_t at = offset + 32 * half;
        const __m256i a = load(rows[0] + at), b = load(rows[1] + at), c = load(rows[2] + at), d = load(rows[3] + at);
        const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
        const __m256i ab_high = _mm256_unpackhi_epi8(a, b), cd_high = _mm256_unpackhi_epi8(c, d);
        const __m256i fours[4] = {_mm256_unpacklo_epi16(ab, cd), _mm256_unpackhi_epi16(ab, cd),
                                  _mm256_unpacklo_epi16(ab_high, cd_high), _mm256_unpackhi_epi16(ab_high, cd_high)};
        for (const __m256i four : fours) {
          *out++ = _mm256_and_si256(four, nibble);
          *out++ = _mm256_and_si256(_mm256_srli_epi16(four, 4), nibble);
        }
      }
    }
  }

  // The scales of a unit in the order of unpacked weights.
  static void spread(const std::uint16_t* scales, __m256* out) {
    for (int half = 0; half < 2; ++half, scales += 64)
      for (int i = 0; i < 32; i += 8) {
        const __m256 a = eight(scales + i), b = eight(scales + 32 + i);
        const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
        *out++ = _mm256_shuffle_ps(low, high, 0x88);
        *out++ = _mm256_shuffle_ps(low, high, 0xdd);
      }
  }

  // Half a unit of sums from the order of unpacked weights into that of outputs.
  static void in_order(float* sums) {
    __m256 out[8];
    for (int i = 0; i < 4; ++i) {
      const __m256 even = _mm256_load_ps(sums + 16 * i), odd = _mm256_load_ps(sums + 16 * i + 8);
      const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
      out[i] = _mm256_permute2f128_ps(low, high, 0x20);
      out[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
    for (int i = 0; i < 8; ++i) _mm256_store_ps(sums + 8 * i, out[i]);
  }

  static inline __attribute__((always_inline)) __m256i four(const std::int8_t* x) {
    std::int32_t all;
    std::memcpy(&all, x, 4);
    return _mm256_set1_epi32(all);
  }

  static inline __attribute__((always_inline)) void scale(__m256i sum, __m256 scales, float* to) {
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))), scales);
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), product));
  }

  // Four vectors of outputs for R rows of activations: each vector of weights is loaded once for all of them.
  template <int R>
  static __attribute__((noinline)) void multiply_tile(const __m256i* w, const std::int8_t* x, std::int64_t quads,
                                                      const std::int32_t* starts, const __m256* scales, float* to,
                                                      std::int64_t stride) {
    __m256i sums[R][4];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sums[r][n] = _mm256_set1_epi32(starts[r]);
#pragma GCC unroll 1
    for (std::int64_t quad = 0; quad < quads; ++quad, w += vectors, x += 4) {
      const __m256i first = four(x), second = four(x + (R > 1 ? most_channels : 0));
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        const __m256i weights = w[n];
        sums[0][n] = add(sums[0][n], weights, first);
        if constexpr (R > 1) sums[1][n] = add(sums[1][n], weights, second);
        if constexpr (R > 2) sums[2][n] = add(sums[2][n], weights, x + 2 * most_channels);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) scale(sums[r][n], scales[n], to + r * stride + 8 * n);
  }

  // to += (sums - zero) * scales. The sums are of even and odd outputs of two runs of 16, the second 32 further on.
  static inline __attribute__((always_inline)) void finish(__m256i even, __m256i odd, __m256i zero, const std::uint16_t* scales,
                                                           float* to) {
    even = _mm256_sub_epi16(even, zero);
    odd = _mm256_sub_epi16(odd, zero);
    const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
    scale_eight(_mm256_castsi256_si128(low), scales, to);
    scale_eight(_mm256_castsi256_si128(high), scales + 8, to + 8);
    scale_eight(_mm256_extracti128_si256(low, 1), scales + 32, to + 32);
    scale_eight(_mm256_extracti128_si256(high, 1), scales + 40, to + 40);
  }

  static inline __m256 eight(const std::uint16_t* scales) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  }

  static inline __attribute__((always_inline)) void scale_eight(__m128i sums, const std::uint16_t* scales, float* to) {
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(sums)), eight(scales));
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), product));
  }

  const Product& p;
  float *sums, *totals;      // [rows, columns] of a part, and of the parts before it
  std::int32_t* starts;      // [groups, most_rows]
  std::int8_t* activations;  // [groups, most_rows, most_channels]
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
