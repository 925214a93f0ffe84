// AVX-512 with VNNI: the arrangement of isa_avx2.cpp with four lanes, and sums in 32 bits from the start.
#ifdef EDGEXPERT_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#else
#include <immintrin.h>
#endif

#include "dense_isa.h"
#include "matmul.h"
#include "select_isa.h"

namespace edgexpert {
namespace {

struct Avx512 {
  static constexpr int width = 16;
  using F = __m512;
  using I = __m512i;

  static __m512i broadcast(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  static F value(float x) { return _mm512_set1_ps(x); }
  static I integer(std::int32_t x) { return _mm512_set1_epi32(x); }
  static I times(I a, std::int32_t x) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(x)); }
  // See isa_avx2.cpp.
  static __m512i in_order(__m512i sum) {
#ifndef EDGEXPERT_EMULATE_AVX512
    asm volatile("" : "+v"(sum));
#endif
    return sum;
  }

  static __m512i bytes(const void* p) { return _mm512_loadu_si512(p); }
#ifdef EDGEXPERT_EMULATE_AVX512  // SIMDe lacks these conversions
  static F join(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }
  static F floats(I a) {
    return join(_mm256_cvtepi32_ps(_mm512_castsi512_si256(a)), _mm256_cvtepi32_ps(_mm512_extracti64x4_epi64(a, 1)));
  }
  static __m512i widen(__m256i half) {
    const __m512i low = _mm512_castsi256_si512(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(half)));
    return _mm512_inserti64x4(low, _mm256_cvtepu16_epi32(_mm256_extracti128_si256(half, 1)), 1);
  }
  static F float16(__m256i h) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
  }
#else
  static F floats(I a) { return _mm512_cvtepi32_ps(a); }
  static __m512i widen(__m256i half) { return _mm512_cvtepu16_epi32(half); }
  static F float16(__m256i h) { return _mm512_cvtph_ps(h); }
#endif
  static F bfloat16(const std::uint8_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(widen(half), 16));
  }

  template <class Use>
  static __attribute__((always_inline)) void interleave(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
    const __m512i a = bytes(rows[0] + offset), b = bytes(rows[1] + offset);
    const __m512i c = bytes(rows[2] + offset), d = bytes(rows[3] + offset);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
    use(0, _mm512_unpacklo_epi16(ab, cd));
    use(1, _mm512_unpackhi_epi16(ab, cd));
    use(2, _mm512_unpacklo_epi16(AB, CD));
    use(3, _mm512_unpackhi_epi16(AB, CD));
  }

  // The 64-bit element `k` of each of four 512-bit vectors, as 256 bits.
  static __m256i column(const __m512i* rows, int k) {
    const __m512i index = _mm512_setr_epi64(k, 8 + k, 0, 0, 0, 0, 0, 0);
    const __m512i low = _mm512_permutex2var_epi64(rows[0], index, rows[1]);
    const __m512i high = _mm512_permutex2var_epi64(rows[2], index, rows[3]);
    return _mm256_inserti128_si256(_mm512_castsi512_si256(low), _mm512_castsi512_si128(high), 1);
  }

  // Sixteen floats of four vectors with four outputs a lane -> sixteen consecutive outputs of each lane.
  static void gather_lanes(const F* v, float* out, int lane_outputs) {
    for (int k = 0; k < 4; ++k) {
      _mm_storeu_ps(out + 4 * k, _mm512_extractf32x4_ps(v[k], 0));
      _mm_storeu_ps(out + 4 * k + lane_outputs, _mm512_extractf32x4_ps(v[k], 1));
      _mm_storeu_ps(out + 4 * k + 2 * lane_outputs, _mm512_extractf32x4_ps(v[k], 2));
      _mm_storeu_ps(out + 4 * k + 3 * lane_outputs, _mm512_extractf32x4_ps(v[k], 3));
    }
  }

  // Two vectors of outputs, whose weights are the low and the high nibbles of the same bytes. Taken whole, a byte is the low nibble and
  // 16 times the high one: `all` sums the bytes and `high` what is left of them without the low nibbles, which is exact.
  struct Nibbles {
    static constexpr int width = 32;
    struct F {
      __m512 even, odd;
    };
    struct I {
      __m512i all, high;
    };
    static __m512i broadcast(const std::int8_t* x) { return Avx512::broadcast(x); }
    static __m512i high(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(-16)); }
    static F load(const float* p) { return {Avx512::load(p), Avx512::load(p + 16)}; }
    static void store(float* p, F a) {
      Avx512::store(p, a.even);
      Avx512::store(p + 16, a.odd);
    }
    static F add(F a, F b) { return {Avx512::add(a.even, b.even), Avx512::add(a.odd, b.odd)}; }
    static F multiply(F a, F b) { return {Avx512::multiply(a.even, b.even), Avx512::multiply(a.odd, b.odd)}; }
    static F floats(I a) { return {Avx512::floats(_mm512_sub_epi32(a.all, a.high)), Avx512::floats(a.high)}; }
    static I integer(std::int32_t x) { return {Avx512::integer(17 * x), Avx512::integer(16 * x)}; }
    static I times(I a, std::int32_t x) { return {Avx512::times(a.all, x), Avx512::times(a.high, x)}; }
  };

  // Lane l of a row has outputs 32l..32l+31; vector k has outputs 8k..8k+7 of each lane, even ones before odd ones.
  struct Four {
    using V = Nibbles;
    using W = __m512i;
    using I = Nibbles::I;
    using F = Nibbles::F;
    static constexpr int bits = 4, vectors = 4, unit = 128, unit_bytes = 64, zero = 8, rows = 2, columns = 4;

    static I step(I a, W w, __m512i x) {
      return {in_order(_mm512_dpbusd_epi32(a.all, w, x)), in_order(_mm512_dpbusd_epi32(a.high, Nibbles::high(w), x))};
    }
    static I first(W w) { return {w, Nibbles::high(w)}; }

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      interleave(rows, offset, use);
    }
    // Those of odd outputs are divided by 16, as their sums are 16 times too large.
    static void scales(const std::uint16_t* s, F* out) {
      const __m512i split = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
      __m512i lanes[4];
      for (int l = 0; l < 4; ++l) lanes[l] = _mm512_shuffle_epi8(bytes(s + 32 * l), split);
      const auto four = [&](__m512i low, __m512i high, int k, auto use) __attribute__((always_inline)) {
        // the 128 bits 2k and 2k + 1 of both
        const __m512i index = _mm512_add_epi64(_mm512_set1_epi64(4 * k), _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11));
        const __m512i both = _mm512_permutex2var_epi64(low, index, high);
        use(out[2 * k], float16(_mm512_castsi512_si256(both)));
        use(out[2 * k + 1], float16(_mm512_extracti64x4_epi64(both, 1)));
      };
      const __m512i even[2] = {_mm512_unpacklo_epi64(lanes[0], lanes[1]), _mm512_unpacklo_epi64(lanes[2], lanes[3])};
      const __m512i odd[2] = {_mm512_unpackhi_epi64(lanes[0], lanes[1]), _mm512_unpackhi_epi64(lanes[2], lanes[3])};
      for (int k = 0; k < 2; ++k) {
        four(even[0], even[1], k, [](F& f, __m512 scale) { f.even = scale; });
        four(odd[0], odd[1], k, [](F& f, __m512 scale) { f.odd = Avx512::multiply(scale, value(1.0f / 16)); });
      }
    }
    static void store(const float* sums, float* out) {
      __m512 v[4];
      for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 2; ++k) {
          const F sum = Nibbles::load(sums + 32 * (2 * half + k));
          v[2 * k] = _mm512_unpacklo_ps(sum.even, sum.odd);
          v[2 * k + 1] = _mm512_unpackhi_ps(sum.even, sum.odd);
        }
        gather_lanes(v, out + 16 * half, 32);
      }
    }
  };

  // Lane l of a row has outputs 16l..16l+15; vector k has outputs 4k..4k+3 of each lane. Weights are stored plus 128, unsigned.
  struct Eight {
    using V = Avx512;
    using W = __m512i;
    using I = __m512i;
    using F = __m512;
    static constexpr int bits = 8, vectors = 4, unit = 64, unit_bytes = 64, zero = 128, rows = 4, columns = 4;

    static I step(I a, W w, __m512i x) { return in_order(_mm512_dpbusd_epi32(a, w, x)); }
    static I first(W w) { return w; }

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      const __m512i sign = _mm512_set1_epi8(-128);
      interleave(rows, offset, [&](int k, __m512i quads) __attribute__((always_inline)) { use(k, _mm512_xor_si512(quads, sign)); });
    }
    static void scales(const std::uint16_t* s, F* out) {
      __m512i lanes[4];
      for (int l = 0; l < 4; ++l) lanes[l] = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + 16 * l)));
      for (int k = 0; k < 4; ++k) out[k] = float16(column(lanes, k));
    }
    static void store(const float* sums, float* out) {
      F v[4];
      for (int k = 0; k < 4; ++k) v[k] = load(sums + 16 * k);
      gather_lanes(v, out, 16);
    }
  };
};

std::uint64_t read(const std::uint8_t* bytes, std::int64_t n) {
  __m512i sum[4] = {};
  for (std::int64_t at = 0; at < n; at += 256)
    for (int i = 0; i < 4; ++i) sum[i] = _mm512_xor_si512(sum[i], Avx512::bytes(bytes + at + 64 * i));
  alignas(64) std::uint64_t words[8];
  _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
  std::uint64_t all = 0;
  for (int i = 0; i < 8; ++i) all ^= words[i];
  return all;
}

std::int64_t peak(std::int64_t rounds) {
  __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(5), sum[16] = {};
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      w = Avx512::in_order(w);  // or the compiler computes one product for all
      sum[k] = Avx512::Eight::step(sum[k], w, x);
    }
  }
  for (int k = 0; k < 16; ++k) asm volatile("" : : "m"(sum[k]));
  return rounds * 16 * 64;
}

}  // namespace

const Isa isa_avx512 = {"avx512", product<Avx512>, join, quantise, activate, add_scaled,
                        read, peak, rms_norm_row, float_product, attend, exp_sum, weigh, sort_into_bins, values_of_bin, mark, add_scores, load_salient, list_channels, pack_channels};

}  // namespace edgexpert
