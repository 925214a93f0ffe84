// Arm with the dot-product instructions (Armv8.2 and newer, optional before Armv8.4).
#include <arm_neon.h>

#include "dense_isa.h"
#include "matmul.h"
#include "select_isa.h"

namespace edgexpert {
namespace {

struct Neon {
  static constexpr int width = 4;
  using F = float32x4_t;
  using I = int32x4_t;

  static int8x16_t broadcast(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F a) { vst1q_f32(p, a); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F multiply(F a, F b) { return vmulq_f32(a, b); }
  static F floats(I a) { return vcvtq_f32_s32(a); }
  static F value(float x) { return vdupq_n_f32(x); }
  static I integer(std::int32_t x) { return vdupq_n_s32(x); }
  static I times(I a, std::int32_t x) { return vmulq_n_s32(a, x); }
  static F bfloat16(const std::uint8_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
  }
  static F float16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }

  // Interleaves 32 bytes of four rows; use(k, v) gets the quads of bytes 4k..4k+3.
  template <class Use>
  static __attribute__((always_inline)) void interleave(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
    for (int half = 0; half < 2; ++half, offset += 16) {
      const uint8x16_t a = vld1q_u8(rows[0] + offset), b = vld1q_u8(rows[1] + offset);
      const uint8x16_t c = vld1q_u8(rows[2] + offset), d = vld1q_u8(rows[3] + offset);
      const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(a, b)), cd = vreinterpretq_u16_u8(vzip1q_u8(c, d));
      const uint16x8_t AB = vreinterpretq_u16_u8(vzip2q_u8(a, b)), CD = vreinterpretq_u16_u8(vzip2q_u8(c, d));
      use(4 * half, vreinterpretq_u8_u16(vzip1q_u16(ab, cd)));
      use(4 * half + 1, vreinterpretq_u8_u16(vzip2q_u16(ab, cd)));
      use(4 * half + 2, vreinterpretq_u8_u16(vzip1q_u16(AB, CD)));
      use(4 * half + 3, vreinterpretq_u8_u16(vzip2q_u16(AB, CD)));
    }
  }

  struct Sums {
    using V = Neon;
    using W = int8x16_t;
    using I = int32x4_t;
    using F = float32x4_t;
    static constexpr int rows = 4, columns = 4, unit_bytes = 32;
    static I step(I a, W w, int8x16_t x) { return vdotq_s32(a, w, x); }
    static I first(W w) { return vreinterpretq_s32_s8(w); }
  };

  // Vector 2k has the even and 2k+1 the odd of outputs 8k..8k+7.
  struct Four : Sums {
    static constexpr int bits = 4, vectors = 16, unit = 64, zero = 8;

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      interleave(rows, offset, [&](int k, uint8x16_t quads) __attribute__((always_inline)) {
        use(2 * k, vreinterpretq_s8_u8(vandq_u8(quads, vdupq_n_u8(15))));
        use(2 * k + 1, vreinterpretq_s8_u8(vshrq_n_u8(quads, 4)));
      });
    }
    static void scales(const std::uint16_t* s, F* out) {
      for (int k = 0; k < 8; ++k) {
        const uint16x4x2_t split = vld2_u16(s + 8 * k);
        out[2 * k] = float16(split.val[0]);
        out[2 * k + 1] = float16(split.val[1]);
      }
    }
    static void store(const float* sums, float* out) {
      for (int k = 0; k < 8; ++k) {
        const float32x4x2_t both = {{vld1q_f32(sums + 8 * k), vld1q_f32(sums + 8 * k + 4)}};
        vst2q_f32(out + 8 * k, both);
      }
    }
  };

  // Vector k has outputs 4k..4k+3.
  struct Eight : Sums {
    static constexpr int bits = 8, vectors = 8, unit = 32, zero = 0;

    template <class Use>
    static __attribute__((always_inline)) void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      interleave(rows, offset, [&](int k, uint8x16_t quads) __attribute__((always_inline)) { use(k, vreinterpretq_s8_u8(quads)); });
    }
    static void scales(const std::uint16_t* s, F* out) {
      for (int k = 0; k < 8; ++k) out[k] = float16(vld1_u16(s + 4 * k));
    }
    static void store(const float* sums, float* out) { std::memcpy(out, sums, sizeof(float) * unit); }
  };
};

std::uint64_t read(const std::uint8_t* bytes, std::int64_t n) {
  uint64x2_t sum[8] = {};
  for (std::int64_t at = 0; at < n; at += 256)
    for (int i = 0; i < 16; ++i) sum[i % 8] = veorq_u64(sum[i % 8], vreinterpretq_u64_u8(vld1q_u8(bytes + at + 16 * i)));
  for (int i = 1; i < 8; ++i) sum[0] = veorq_u64(sum[0], sum[i]);
  return vgetq_lane_u64(sum[0], 0) ^ vgetq_lane_u64(sum[0], 1);
}

std::int64_t peak(std::int64_t rounds) {
  int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(5);
  int32x4_t sum[16] = {};
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      asm volatile("" : "+w"(w));  // or the compiler computes one product for all
      sum[k] = Neon::Sums::step(sum[k], w, x);
    }
  }
  for (int k = 0; k < 16; ++k) asm volatile("" : : "w"(sum[k]));
  return rounds * 16 * 16;
}

}  // namespace

const Isa isa_neon = {"neon", product<Neon>, join, quantise, activate, add_scaled,
                      read, peak, rms_norm_row, float_product, attend, exp_sum, weigh, sort_into_bins, values_of_bin, mark, add_scores, load_salient, list_channels, pack_channels};

}  // namespace edgexpert
