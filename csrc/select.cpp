#include "select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "pool.h"

namespace edgexpert {
namespace {

constexpr int kBins = 2048;  // by exponent and the three highest bits of the mantissa

int bin_of(float value) { return static_cast<int>(std::bit_cast<std::uint32_t>(value) >> 20); }

// The least of the largest values that together hold `share` of the sum; values are not negative.
float least_of_share(const float* values, std::int64_t n, double share, std::vector<float>& boundary) {
  double sums[kBins] = {};
  for (std::int64_t i = 0; i < n; ++i) sums[bin_of(values[i])] += values[i];
  double total = 0;
  for (int bin = kBins - 1; bin >= 0; --bin) total += sums[bin];
  double target = share * total, held = 0;
  int bin = kBins - 1;
  while (bin > 0 && held + sums[bin] < target) held += sums[bin--];
  boundary.clear();
  for (std::int64_t i = 0; i < n; ++i)
    if (bin_of(values[i]) == bin) boundary.push_back(values[i]);
  if (boundary.empty()) return 0;  // nothing but zeros
  std::sort(boundary.begin(), boundary.end(), std::greater<>());
  for (float value : boundary) {
    held += value;
    if (held >= target) return value;
  }
  return boundary.back();
}

}  // namespace

void needed_channels(const float* activations, const float* weights, const std::int64_t* offsets, std::int64_t tokens,
                     std::int64_t channels, double share, bool* mask) {
  parallel_for(tokens, [&](std::int64_t token, int) {
    std::int64_t first = offsets[token], n = (offsets[token + 1] - first) * channels;
    if (n == 0) return;
    std::vector<float> importance(n), boundary;
    for (std::int64_t pair = first; pair < offsets[token + 1]; ++pair)
      for (std::int64_t c = 0; c < channels; ++c)
        importance[(pair - first) * channels + c] = std::fabs(activations[pair * channels + c]) * std::fabs(weights[pair]);
    float least = least_of_share(importance.data(), n, share, boundary);
    for (std::int64_t i = 0; i < n; ++i) mask[first * channels + i] = importance[i] >= least;
    for (std::int64_t pair = first; pair < offsets[token + 1]; ++pair) {  // every pair keeps its own largest
      auto row = importance.begin() + (pair - first) * channels;
      mask[pair * channels + (std::max_element(row, row + channels) - row)] = true;
    }
  });
}

void salient_channels(const float* activations, const float* weights, const bool* mask, const std::int64_t* pair_expert,
                      const std::int64_t* pair_depth, std::int64_t pairs, std::int64_t channels, float selection_ratio,
                      std::int64_t experts, bool* loaded) {
  std::vector<std::int64_t> order(pairs);  // by expert, then depth
  for (std::int64_t i = 0; i < pairs; ++i) order[i] = i;
  auto group = [&](std::int64_t pair) { return std::pair(pair_expert[pair], pair_depth[pair]); };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return group(a) < group(b); });
  parallel_for(experts, [&](std::int64_t expert, int) {
    auto by_expert = [&](std::int64_t pair, std::int64_t e) { return pair_expert[pair] < e; };
    auto it = std::lower_bound(order.begin(), order.end(), expert, by_expert);
    std::vector<float> all(channels), salient(channels);
    while (it != order.end() && pair_expert[*it] == expert) {
      std::int64_t depth = pair_depth[*it];
      std::fill(all.begin(), all.end(), 0.0f);
      std::fill(salient.begin(), salient.end(), 0.0f);
      for (; it != order.end() && pair_expert[*it] == expert && pair_depth[*it] == depth; ++it) {
        const float* row = activations + *it * channels;
        const bool* needed = mask + *it * channels;
        for (std::int64_t c = 0; c < channels; ++c) {
          float score = std::fabs(row[c]) * weights[*it];
          all[c] += score;
          salient[c] += needed[c] ? score : 0.0f;
        }
      }
      for (std::int64_t c = 0; c < channels; ++c) loaded[expert * channels + c] |= salient[c] > selection_ratio * all[c];
    }
  });
}

}  // namespace edgexpert
