// Plain C++ for any processor: loops of fixed length over a unit of 32 outputs, which compilers turn into vector instructions.
#include "dense_isa.h"
#include "matmul.h"
#include "select_isa.h"

namespace edgexpert {
namespace {

struct Portable {
  static constexpr int width = 32;

  struct Floats {
    float v[width];
  };
  struct Integers {
    std::int32_t v[width];
  };
  using F = Floats;
  using I = Integers;
  struct Quad {
    std::int32_t v[4];
  };

  static Quad broadcast(const std::int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }

  template <class R, class Function>
  static R each(Function f) {
    R r;
    for (int i = 0; i < width; ++i) r.v[i] = f(i);
    return r;
  }

  static F load(const float* p) { return each<F>([=](int i) { return p[i]; }); }
  static void store(float* p, const F& a) {
    for (int i = 0; i < width; ++i) p[i] = a.v[i];
  }
  static F add(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] + b.v[i]; }); }
  static F multiply(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] * b.v[i]; }); }
  static F floats(const I& a) { return each<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
  static F value(float x) { return each<F>([=](int) { return x; }); }
  static I integer(std::int32_t x) { return each<I>([=](int) { return x; }); }
  static I times(const I& a, std::int32_t x) { return each<I>([&](int i) { return a.v[i] * x; }); }
  static F bfloat16(const std::uint8_t* p) {
    return each<F>([=](int i) {
      const std::uint32_t bits = static_cast<std::uint32_t>(p[2 * i] | p[2 * i + 1] << 8) << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    });
  }
  // The exponent is moved in place and rebiased by an exact multiplication, which also makes subnormals right.
  static F float16(const std::uint16_t* p) {
    return each<F>([=](int i) {
      const std::uint32_t magnitude = (p[i] & 0x7fffu) << 13, infinite = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
      float f;
      std::memcpy(&f, &magnitude, 4);
      f *= 0x1p112f;
      std::uint32_t bits;
      std::memcpy(&bits, &f, 4);
      bits |= infinite | (p[i] & 0x8000u) << 16;
      std::memcpy(&f, &bits, 4);
      return f;
    });
  }

  template <int Bits>
  struct Format {
    using V = Portable;
    using F = Floats;
    using I = Integers;
    struct W {
      std::int8_t v[4][width];
    };
    static constexpr int bits = Bits, vectors = 1, unit = width, unit_bytes = width * Bits / 8, zero = Bits == 4 ? 8 : 0;
    static constexpr int rows = 2, columns = 1;

    template <class Use>
    static void unpack(const std::uint8_t* const* rows, std::int64_t offset, Use use) {
      W w;
      for (int c = 0; c < 4; ++c) {
        const std::uint8_t* row = rows[c] + offset;
        if constexpr (Bits == 8) {
          std::memcpy(w.v[c], row, width);
        } else {
          for (int i = 0; i < width / 2; ++i) {
            w.v[c][2 * i] = static_cast<std::int8_t>(row[i] & 15);
            w.v[c][2 * i + 1] = static_cast<std::int8_t>(row[i] >> 4);
          }
        }
      }
      use(0, w);
    }
    static void scales(const std::uint16_t* s, F* out) { *out = float16(s); }
    static I step(const I& a, const W& w, const Quad& x) {
      I r = a;
      for (int c = 0; c < 4; ++c)
        for (int i = 0; i < width; ++i) r.v[i] += static_cast<std::int16_t>(w.v[c][i] * static_cast<std::int16_t>(x.v[c]));
      return r;
    }
    static I first(const W& w) { return each<I>([&](int i) { return w.v[0][i]; }); }
    static void store(const float* sums, float* out) { std::memcpy(out, sums, sizeof(float) * width); }
  };
  using Four = Format<4>;
  using Eight = Format<8>;
};

std::uint64_t read(const std::uint8_t* bytes, std::int64_t n) {
  std::uint64_t sum[32] = {};
  for (std::int64_t at = 0; at < n; at += 256)
    for (int i = 0; i < 32; ++i) {
      std::uint64_t word;
      std::memcpy(&word, bytes + at + 8 * i, 8);
      sum[i] ^= word;
    }
  std::uint64_t all = 0;
  for (int i = 0; i < 32; ++i) all ^= sum[i];
  return all;
}

std::int64_t peak(std::int64_t rounds) {
  std::int32_t sum[64] = {};
  for (std::int64_t i = 0; i < rounds; ++i) {
    for (int k = 0; k < 64; ++k) sum[k] += static_cast<std::int16_t>(k) * static_cast<std::int16_t>(i);
    asm volatile("" : : "r"(sum) : "memory");
  }
  return rounds * 64;
}

}  // namespace

const Isa isa_portable = {"portable", product<Portable>, join, quantise, activate, add_scaled,
                          read, peak, rms_norm_row, float_product, attend, exp_sum, weigh, sort_into_bins, values_of_bin, mark, add_scores, load_salient, list_channels, pack_channels};

}  // namespace edgexpert
