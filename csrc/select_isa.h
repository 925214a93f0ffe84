// The inner loops of select.h, over floats one by one, and the packing of what was selected: every instruction set gives the same
// bits. Included by each isa_*.cpp.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "isa.h"

namespace edgexpert {
namespace {

// out = |x| * weight; returns the largest.
float weigh(const float* __restrict x, float weight, std::int64_t n, float* __restrict out) {
  std::int32_t most = 0;  // as bits, which compare as the floats do
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = std::fabs(x[i]) * weight;
    const auto bits = std::bit_cast<std::int32_t>(out[i]);
    most = bits > most ? bits : most;
  }
  return std::bit_cast<float>(most);
}

// Bins by exponent and the five highest bits of the mantissa, the largest value in the first; the last takes the rest.
void sort_into_bins(const float* __restrict values, std::int64_t n, float largest, std::uint16_t* __restrict bins) {
  const std::int32_t top = std::bit_cast<std::int32_t>(largest) >> 18;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t below = top - (std::bit_cast<std::int32_t>(values[i]) >> 18);
    const std::int32_t bin = below < kBins - 1 ? below : kBins - 1;
    bins[i] = static_cast<std::uint16_t>(bin > 0 ? bin : 0);  // a NaN may be above the largest
  }
}

// The values of one bin, with room for one more; returns how many.
std::int64_t values_of_bin(const float* values, const std::uint16_t* bins, std::int64_t n, std::uint16_t bin, float* out) {
  constexpr std::int64_t block = 32;  // most of these hold none
  std::int64_t count = 0;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      out[count] = values[i];
      count += bins[i] == bin;
    }
  };
  std::int64_t begin = 0;
  for (; begin + block <= n; begin += block) {
    std::uint16_t differences[block], least = 0xffff;
    for (std::int64_t i = 0; i < block; ++i) differences[i] = bins[begin + i] ^ bin;
    for (std::int64_t i = 0; i < block; ++i) least = differences[i] < least ? differences[i] : least;
    if (least == 0) add(begin, begin + block);
  }
  add(begin, n);
  return count;
}

// marked = whether a value reaches the least one
void mark(const float* __restrict values, float least, std::int64_t n, bool* __restrict marked) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(marked);
  for (std::int64_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(values[i] >= least);
}

// all += |x| * weight; salient the same where a channel is needed
void add_scores(const float* __restrict x, float weight, const bool* __restrict needed, std::int64_t n, float* __restrict all,
                float* __restrict salient) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(needed);  // compilers vectorise these, not bools
  for (std::int64_t c = 0; c < n; ++c) {
    const float score = std::fabs(x[c]) * weight;
    all[c] += score;
    salient[c] += bytes[c] ? score : 0.0f;
  }
}

// loaded |= whether the salient part reaches its share of all
void load_salient(const float* __restrict all, const float* __restrict salient, float ratio, std::int64_t n, bool* __restrict loaded) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(loaded);
  for (std::int64_t c = 0; c < n; ++c) bytes[c] |= static_cast<std::uint8_t>(salient[c] > ratio * all[c]);
}

// Of each set of eight bytes, which ones are in it.
constexpr auto kMembers = [] {
  std::array<std::array<std::uint8_t, 8>, 256> members{};
  for (int set = 0; set < 256; ++set)
    for (int i = 0, n = 0; i < 8; ++i)
      if (set >> i & 1) members[set][n++] = static_cast<std::uint8_t>(i);
  return members;
}();

inline std::uint64_t eight_bytes(const void* p) {
  std::uint64_t bytes;
  std::memcpy(&bytes, p, 8);
  return bytes;
}
// Of eight bools, one a byte.
inline std::int64_t set_of(std::uint64_t bools) { return static_cast<std::int64_t>(bools * 0x0102040810204080u >> 56); }
inline std::int64_t count_of(std::uint64_t bools) { return static_cast<std::int64_t>(bools * 0x0101010101010101u >> 56); }

// The bytes that are `members`, moved to the front; what stands behind them is left open.
inline std::uint64_t front_of(std::uint64_t bytes, const std::array<std::uint8_t, 8>& members) {
#if defined(__SSSE3__)
  const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(members.data()));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_shuffle_epi8(_mm_cvtsi64_si128(static_cast<std::int64_t>(bytes)), order)));
#elif defined(__ARM_NEON)
  return vget_lane_u64(vreinterpret_u64_u8(vtbl1_u8(vcreate_u8(bytes), vld1_u8(members.data()))), 0);
#else
  std::uint64_t front = 0;
  for (int i = 0; i < 8; ++i) front |= (bytes >> 8 * members[i] & 255) << 8 * i;
  return front;
#endif
}

inline std::int32_t sum_of(std::uint64_t signed_bytes) {
  const std::uint64_t bytes = signed_bytes ^ 0x8080808080808080u;  // plus 128
  const std::uint64_t pairs = (bytes & 0x00ff00ff00ff00ffu) + (bytes >> 8 & 0x00ff00ff00ff00ffu);
  return static_cast<std::int32_t>(pairs * 0x0001000100010001u >> 48) - 8 * 128;
}

// The loaded ones of n channels, each block of them padded to whole quads by its last one: quad q of block b is
// [quads[b], quads[b + 1]). Room for eight more.
void list_channels(const bool* loaded, std::int64_t n, std::int64_t block, std::int32_t* channels, std::int32_t* quads) {
  std::int64_t count = 0;
  quads[0] = 0;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = begin + block < n ? begin + block : n;
    std::int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      const std::uint64_t kept = eight_bytes(loaded + i);
      const std::array<std::uint8_t, 8> offsets = kMembers[set_of(kept)];
      for (int k = 0; k < 8; ++k) channels[count + k] = static_cast<std::int32_t>(i) + offsets[k];
      count += count_of(kept);
    }
    for (; i < end; ++i) {
      channels[count] = static_cast<std::int32_t>(i);
      count += loaded[i];
    }
    for (; count % 4; ++count) channels[count] = channels[count - 1];
    *++quads = static_cast<std::int32_t>(count / 4);
  }
}

// The values of these channels, with zeros for padding and for what is not computed on (a null `compute` is for all), and their sums
// by block. Room for eight more.
void pack_channels(const std::int8_t* x, const bool* loaded, const bool* compute, std::int64_t n, std::int64_t block,
                   std::int8_t* packed, std::int32_t* sums) {
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = begin + block < n ? begin + block : n;
    std::int32_t sum = 0;
    std::int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      const std::uint64_t kept = eight_bytes(loaded + i), computed = compute ? eight_bytes(compute + i) : kept;
      const std::uint64_t values = eight_bytes(x + i) & (kept & computed) * 255;
      const std::uint64_t front = front_of(values, kMembers[set_of(kept)]);
      std::memcpy(packed + count, &front, 8);
      count += count_of(kept);
      sum += sum_of(values);
    }
    for (; i < end; ++i) {
      packed[count] = compute && !compute[i] ? std::int8_t{0} : x[i];
      sum += loaded[i] ? packed[count] : 0;
      count += loaded[i];
    }
    std::memset(packed + count, 0, 4);
    count = (count + 3) / 4 * 4;
    *sums++ = sum;
  }
}

}  // namespace
}  // namespace edgexpert
