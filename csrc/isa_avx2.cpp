// AVX2 (with F16C). A 4-bit sum runs in 16 bits for eight quads: 2 * 15 * 127 * 8 = 30480 fits.
#include <immintrin.h>

#include "avx2_four.h"
#include "dense_isa.h"
#include "matmul.h"
#include "select_isa.h"

namespace edgexpert {
namespace {

struct Avx2 {
  static constexpr int width = 8;
  using F = __m256;
  using I = __m256i;

  static __m256i broadcast(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
  static F floats(I a) { return _mm256_cvtepi32_ps(a); }
  static F value(float x) { return _mm256_set1_ps(x); }
  static I integer(std::int32_t x) { return _mm256_set1_epi32(x); }
  static I times(I a, std::int32_t x) { return _mm256_mullo_epi32(a, _mm256_set1_epi32(x)); }
  static F bfloat16(const std::uint8_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }

  // Left free, gcc computes many products before it adds the first, and spills them.
  static __m256i in_order(__m256i sum) {
    asm volatile("" : "+x"(sum));
    return sum;
  }

  static __m256i bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F low_half(__m256i h) { return _mm256_cvtph_ps(_mm256_castsi256_si128(h)); }
  static F high_half(__m256i h) { return _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)); }

  // Interleaves the bytes of four rows; use(k, v) gets the quads of bytes 4k..4k+3 of each 128-bit lane. One vector at a time,
  // so that they need not all stay in registers.
  template <class Use>
  static __attribute__((always_inline)) void interleave(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
    const __m256i a = bytes(rows[0] + offset), b = bytes(rows[1] + offset);
    const __m256i c = bytes(rows[2] + offset), d = bytes(rows[3] + offset);
    const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
    const __m256i AB = _mm256_unpackhi_epi8(a, b), CD = _mm256_unpackhi_epi8(c, d);
    use(0, _mm256_unpacklo_epi16(ab, cd));
    use(1, _mm256_unpackhi_epi16(ab, cd));
    use(2, _mm256_unpacklo_epi16(AB, CD));
    use(3, _mm256_unpackhi_epi16(AB, CD));
  }

  // Lane l of a row has outputs 32l..32l+31; vector 2k has the even and 2k+1 the odd of outputs 8k..8k+7 of each lane.
  struct Four {
    using V = Avx2;
    using W = __m256i;
    using A = __m256i;
    using I = __m256i;
    using F = __m256;
    static constexpr int bits = 4, vectors = 8, unit = 64, unit_bytes = 32, zero = 8, steps = 8, rows = 4, columns = 2;

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      const __m256i nibble = _mm256_set1_epi8(15);
      interleave(rows, offset, [&](int k, __m256i quads) __attribute__((always_inline)) {
        use(2 * k, _mm256_and_si256(quads, nibble));
        use(2 * k + 1, _mm256_and_si256(_mm256_srli_epi16(quads, 4), nibble));
      });
    }
    static void scales(const std::uint16_t* s, F* out) {
      const __m256i split = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                             0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      for (int i = 0; i < 2; ++i) {  // outputs 16i..16i+15 of each lane, evens before odds
        const __m256i lane0 = _mm256_shuffle_epi8(bytes(s + 16 * i), split);
        const __m256i lane1 = _mm256_shuffle_epi8(bytes(s + 32 + 16 * i), split);
        const __m256i even = _mm256_unpacklo_epi64(lane0, lane1), odd = _mm256_unpackhi_epi64(lane0, lane1);
        out[4 * i] = low_half(even);
        out[4 * i + 1] = low_half(odd);
        out[4 * i + 2] = high_half(even);
        out[4 * i + 3] = high_half(odd);
      }
    }
    static A none() { return _mm256_setzero_si256(); }
    static A step(A a, W w, __m256i x) { return in_order(_mm256_add_epi16(a, _mm256_maddubs_epi16(w, x))); }
    static I fold(I total, A a) { return _mm256_add_epi32(total, _mm256_madd_epi16(a, _mm256_set1_epi16(1))); }
    static I first(W w) { return w; }
    static void store(const float* sums, float* out) {
      for (int k = 0; k < 4; ++k) {
        const F even = load(sums + 16 * k), odd = load(sums + 16 * k + 8);
        const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        Avx2::store(out + 8 * k, _mm256_permute2f128_ps(low, high, 0x20));
        Avx2::store(out + 32 + 8 * k, _mm256_permute2f128_ps(low, high, 0x31));
      }
    }
  };

  // Lane l of a row has outputs 16l..16l+15; vector k has outputs 4k..4k+3 of each lane.
  struct Eight {
    using V = Avx2;
    using W = __m256i;
    using I = __m256i;
    using F = __m256;
    static constexpr int bits = 8, vectors = 4, unit = 32, unit_bytes = 32, zero = 0, rows = 4, columns = 2;

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      interleave(rows, offset, use);
    }
    static void scales(const std::uint16_t* s, F* out) {
      const __m256i lane0 = bytes(s), lane1 = bytes(s + 16);
      const __m256i even = _mm256_unpacklo_epi64(lane0, lane1), odd = _mm256_unpackhi_epi64(lane0, lane1);
      out[0] = low_half(even);
      out[1] = low_half(odd);
      out[2] = high_half(even);
      out[3] = high_half(odd);
    }
    // The first factor must be unsigned: the sign of the weight goes to the activation. 2 * 127 * 127 fits in 16 bits.
    static I step(I a, W w, __m256i x) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
      return in_order(_mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
    static I first(W w) { return w; }
    static void store(const float* sums, float* out) {
      for (int k = 0; k < 2; ++k) {
        const F low = load(sums + 16 * k), high = load(sums + 16 * k + 8);
        Avx2::store(out + 8 * k, _mm256_permute2f128_ps(low, high, 0x20));
        Avx2::store(out + 16 + 8 * k, _mm256_permute2f128_ps(low, high, 0x31));
      }
    }
  };
};

std::uint64_t read(const std::uint8_t* bytes, std::int64_t n) {
  __m256i sum[8] = {};
  for (std::int64_t at = 0; at < n; at += 256)
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_xor_si256(sum[i], Avx2::bytes(bytes + at + 32 * i));
  for (int i = 1; i < 8; ++i) sum[0] = _mm256_xor_si256(sum[0], sum[i]);
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sum[0], 0) ^ _mm256_extract_epi64(sum[0], 1) ^
                                    _mm256_extract_epi64(sum[0], 2) ^ _mm256_extract_epi64(sum[0], 3));
}

std::int64_t peak(std::int64_t rounds) {
  __m256i w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5), total[8] = {};
  for (std::int64_t i = 0; i < rounds; ++i) {
    __m256i sum[8] = {};
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        w = Avx2::in_order(w);  // or the compiler computes one product for all
        sum[k] = Avx2::Four::step(sum[k], w, x);
      }
    }
    for (int k = 0; k < 8; ++k) total[k] = Avx2::Four::fold(total[k], sum[k]);
  }
  for (int k = 0; k < 8; ++k) asm volatile("" : : "x"(total[k]));
  return rounds * 8 * 8 * 32;
}

}  // namespace

const Isa isa_avx2 = {"avx2", product_avx2<Avx2>, join, quantise, activate, add_scaled,
                      read, peak, rms_norm_row, float_product, attend, exp_sum, weigh, sort_into_bins, values_of_bin, mark, add_scores, load_salient, list_channels, pack_channels};

}  // namespace edgexpert
