// The inner loops of select.h, over floats one by one: every instruction set gives the same bits. Included by each isa_*.cpp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

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
    bins[i] = static_cast<std::uint16_t>(below < kBins - 1 ? below : kBins - 1);
  }
}

// The values of one bin, with room for one more; returns how many.
std::int64_t values_of_bin(const float* values, const std::uint16_t* bins, std::int64_t n, std::uint16_t bin, float* out) {
  constexpr std::int64_t block = 16;  // most of these hold none
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = begin + block < n ? begin + block : n;
    if (end - begin == block) {
      std::uint16_t any = 0;
      for (std::int64_t i = 0; i < block; ++i) any |= bins[begin + i] == bin;
      if (!any) continue;
    }
    for (std::int64_t i = begin; i < end; ++i) {
      out[count] = values[i];
      count += bins[i] == bin;
    }
  }
  return count;
}

// marked = whether a value reaches the least one
void mark(const float* __restrict values, float least, std::int64_t n, bool* __restrict marked) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(marked);
  for (std::int64_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(values[i] >= least);
}

// all += |x| * weight; salient the same where a channel is needed. Without a branch, so that it becomes vector code.
void add_scores(const float* __restrict x, float weight, const bool* __restrict needed, std::int64_t n, float* __restrict all,
                float* __restrict salient) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float score = std::fabs(x[c]) * weight;
    all[c] += score;
    salient[c] += std::bit_cast<float>(std::bit_cast<std::uint32_t>(score) & (0u - static_cast<std::uint32_t>(needed[c])));
  }
}

// loaded |= whether the salient part reaches its share of all
void load_salient(const float* __restrict all, const float* __restrict salient, float ratio, std::int64_t n, bool* __restrict loaded) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(loaded);
  for (std::int64_t c = 0; c < n; ++c) bytes[c] |= static_cast<std::uint8_t>(salient[c] > ratio * all[c]);
}

}  // namespace
}  // namespace edgexpert
