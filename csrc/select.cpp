#include "select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace edgexpert {
namespace {

// The least of the largest values that together hold `share` of the sum. Values are not negative, and none is above `largest`.
float least_of_share(const float* values, std::int64_t n, float largest, double share) {
  thread_local std::vector<std::uint16_t> bins;
  thread_local std::vector<float> boundary;
  bins.resize(n);
  isa().sort_into_bins(values, n, largest, bins.data());
  double sums[4][kBins] = {};  // several, so that neighbours do not wait for each other
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < n; ++i) sums[i % 4][bins[i]] += values[i];
  double total = 0;
  for (int bin = 0; bin < kBins; ++bin) total += sums[0][bin] += sums[1][bin] + sums[2][bin] + sums[3][bin];
  const double target = share * total;
  double held = 0;
  int bin = 0;
  while (bin < kBins - 1 && (sums[0][bin] == 0 || held + sums[0][bin] < target)) held += sums[0][bin++];
  boundary.resize(n + 1);
  const std::int64_t count = isa().values_of_bin(values, bins.data(), n, static_cast<std::uint16_t>(bin), boundary.data());
  if (count == 0) return 0;  // nothing but zeros
  std::sort(boundary.begin(), boundary.begin() + count, std::greater<>());
  for (std::int64_t i = 0; i < count; ++i) {
    held += boundary[i];
    if (held >= target) return boundary[i];
  }
  return boundary[count - 1];
}

}  // namespace

void needed_channels(const float* activations, const std::int64_t* rows, const float* weights, const std::int64_t* offsets,
                     std::int64_t tokens, std::int64_t channels, double share, bool* mask) {
  parallel_for(tokens, [&](std::int64_t token, int) {
    const std::int64_t first = offsets[token], last = offsets[token + 1], n = (last - first) * channels;
    if (n == 0) return;
    thread_local std::vector<float> importance, peaks;
    importance.resize(n);
    peaks.resize(last - first);
    for (std::int64_t pair = first; pair < last; ++pair)
      peaks[pair - first] = isa().weigh(activations + (rows ? rows[pair] : pair) * channels, std::fabs(weights[pair]), channels,
                                        importance.data() + (pair - first) * channels);
    const float least = least_of_share(importance.data(), n, *std::max_element(peaks.begin(), peaks.end()), share);
    for (std::int64_t pair = first; pair < last; ++pair) {
      const float* own = importance.data() + (pair - first) * channels;
      bool* needed = mask + pair * channels;
      isa().mark(own, least, channels, needed);
      if (peaks[pair - first] < least) needed[std::max_element(own, own + channels) - own] = true;  // every pair keeps its own
    }
  });
}

void salient_channels(const float* activations, const std::int64_t* rows, const float* weights, const bool* mask,
                      const std::int64_t* pair_expert, const std::int64_t* pair_depth, std::int64_t pairs, std::int64_t channels,
                      float selection_ratio, std::int64_t experts, bool* loaded) {
  std::vector<std::int64_t> order(pairs);  // by expert, then depth
  for (std::int64_t i = 0; i < pairs; ++i) order[i] = i;
  auto group = [&](std::int64_t pair) { return std::pair(pair_expert[pair], pair_depth[pair]); };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return group(a) < group(b); });
  parallel_for(experts, [&](std::int64_t expert, int) {
    auto by_expert = [&](std::int64_t pair, std::int64_t e) { return pair_expert[pair] < e; };
    auto it = std::lower_bound(order.begin(), order.end(), expert, by_expert);
    thread_local std::vector<float> all, salient;
    all.resize(channels);
    salient.resize(channels);
    bool* own = loaded + expert * channels;
    while (it != order.end() && pair_expert[*it] == expert) {
      const std::int64_t depth = pair_depth[*it];
      std::fill(all.begin(), all.end(), 0.0f);
      std::fill(salient.begin(), salient.end(), 0.0f);
      for (; it != order.end() && pair_expert[*it] == expert && pair_depth[*it] == depth; ++it)
        isa().add_scores(activations + (rows ? rows[*it] : *it) * channels, weights ? weights[*it] : 1.0f, mask + *it * channels,
                         channels, all.data(), salient.data());
      isa().load_salient(all.data(), salient.data(), selection_ratio, channels, own);
    }
  });
}

void TokenPairs::read(const std::int64_t* chosen, const float* weights, std::int64_t tokens, std::int64_t k, std::int64_t experts) {
  expert.clear();
  token.clear();
  weight.clear();
  offsets.assign(1, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = t * k; i < (t + 1) * k; ++i) {
      if (chosen[i] >= experts) continue;
      expert.push_back(chosen[i]);
      token.push_back(t);
      weight.push_back(weights[i]);
    }
    offsets.push_back(count());
  }
}

namespace {

// What a token takes of its best experts: the best one, then those that are shared, then the rest. `none` is no expert.
void take_experts(const std::int64_t* best, std::int64_t candidates, std::int64_t taken, const std::vector<char>& shared,
                  std::int64_t none, std::int64_t* slots) {
  std::int64_t n = 0;
  if (best[0] != none) slots[n++] = 0;
  for (const bool wanted : {true, false})
    for (std::int64_t i = 1; i < candidates && n < taken; ++i)
      if (best[i] != none && static_cast<bool>(shared[best[i]]) == wanted) slots[n++] = i;
}

}  // namespace

void best_experts(const float* choice, const char* own, std::int64_t experts, std::int64_t ranks, std::int64_t* best) {
  thread_local std::vector<std::int64_t> order;
  order.resize(experts);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + ranks, order.end(), [&](std::int64_t a, std::int64_t b) {
    if (own && own[a] != own[b]) return own[a] > own[b];
    const bool nan_a = std::isnan(choice[a]), nan_b = std::isnan(choice[b]);
    if (nan_a != nan_b) return nan_a;
    return choice[a] == choice[b] || nan_a ? a < b : choice[a] > choice[b];
  });
  std::copy_n(order.begin(), ranks, best);
}

void choose_experts(const StageRule& rule, const Ranking& ranking, bool normalise, float scale, std::int64_t tokens, std::int64_t k,
                    std::int64_t experts, std::int64_t* chosen, float* weights) {
  std::vector<std::int64_t> slots(tokens * k);  // ranks of what each token takes, -1 for nothing
  std::vector<char> wanted(experts + 1, 0);
  for (std::int64_t i = 0; i < tokens * k; ++i) slots[i] = i % k;
  const auto expert_of = [&](std::int64_t i) { return slots[i] < 0 ? experts : ranking.experts[i / k * ranking.ranks + slots[i]]; };
  if (rule.tiers) {
    for (std::int64_t i = 0; i < tokens * k; ++i)
      if (rule.tiers[i / k] == 0) wanted[expert_of(i)] = 1;
    for (std::int64_t tier = 1; tier <= 2; ++tier) {
      std::vector<char> extended = wanted;
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (rule.tiers[t] != tier) continue;
        const std::int64_t taken = rule.taken[tier - 1];
        std::fill_n(slots.begin() + t * k, k, -1);
        take_experts(ranking.experts.data() + t * ranking.ranks, rule.candidates[tier - 1], taken, wanted, experts,
                     slots.data() + t * k);
        for (std::int64_t i = t * k; i < t * k + taken; ++i) extended[expert_of(i)] = 1;
      }
      wanted = extended;
    }
  }
  if (rule.keep) {
    for (std::int64_t i = 0; i < tokens * k; ++i)
      if (rule.keep[i / k]) wanted[expert_of(i)] = 1;
    wanted[experts] = 1;
    for (std::int64_t i = 0; i < tokens * k; ++i)
      if (!wanted[expert_of(i)]) slots[i] = -1;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    bool changed = false;
    for (std::int64_t i = 0; i < k; ++i) changed |= slots[t * k + i] != i;
    if (!changed) continue;  // it keeps the router's weights
    const auto gate_of = [&](std::int64_t i) { return slots[i] < 0 ? 0.0f : ranking.gates[t * ranking.ranks + slots[i]]; };
    float sum = 0;
    for (std::int64_t i = t * k; i < (t + 1) * k; ++i) sum += gate_of(i);
    for (std::int64_t i = t * k; i < (t + 1) * k; ++i) {
      chosen[i] = expert_of(i);
      weights[i] = (normalise ? gate_of(i) / std::max(sum, 1e-20f) : gate_of(i)) * scale;
    }
  }
}

void choose_experts(const StageRule& rule, const float* choice, const float* gate, bool normalise, float scale, std::int64_t tokens,
                    std::int64_t k, std::int64_t experts, std::int64_t* chosen, float* weights) {
  Ranking ranking;
  ranking.ranks = rule.tiers ? std::max(k, rule.candidates[1]) : k;
  ranking.experts.assign(chosen, chosen + tokens * k);  // pruning leaves each token's experts in the router's order
  ranking.experts.resize(tokens * ranking.ranks);
  ranking.gates.resize(tokens * ranking.ranks);
  std::vector<char> own(experts + 1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t* best = ranking.experts.data() + t * ranking.ranks;
    const float* row = choice + t * experts;
    if (rule.tiers) {
      std::fill(own.begin(), own.end(), 0);
      for (std::int64_t i = t * k; i < (t + 1) * k; ++i) own[chosen[i]] = 1;
      best_experts(row, own.data(), experts, ranking.ranks, best);
      for (std::int64_t i = 0; i < ranking.ranks; ++i)
        if (!own[best[i]] && row[best[i]] == -INFINITY) best[i] = experts;
    }
    for (std::int64_t i = 0; i < ranking.ranks; ++i)
      ranking.gates[t * ranking.ranks + i] = best[i] < experts ? gate[t * experts + best[i]] : 0.0f;
  }
  choose_experts(rule, ranking, normalise, scale, tokens, k, experts, chosen, weights);
}

void select_channels(const StageRule& rule, const float* activations, const std::int64_t* rows, const TokenPairs& pairs,
                     std::int64_t channels, std::int64_t experts, bool* loaded, bool* compute) {
  thread_local std::vector<std::uint8_t> own;
  thread_local std::vector<std::int64_t> depth;
  thread_local std::vector<float> weight;
  if (!compute) own.resize(pairs.count() * channels);
  bool* mask = compute ? compute : reinterpret_cast<bool*>(own.data());
  needed_channels(activations, rows, pairs.weight.data(), pairs.offsets.data(), static_cast<std::int64_t>(pairs.offsets.size()) - 1,
                  channels, rule.keep_channels, mask);
  std::fill_n(loaded, experts * channels, false);
  if (!rule.coalesce) {
    for (std::int64_t p = 0; p < pairs.count(); ++p)
      for (std::int64_t c = 0; c < channels; ++c) loaded[pairs.expert[p] * channels + c] |= mask[p * channels + c];
    return;
  }
  depth.resize(pairs.count());
  weight.resize(pairs.count());
  for (std::int64_t p = 0; p < pairs.count(); ++p) {
    depth[p] = rule.depth[pairs.token[p]];
    weight[p] = std::max(std::fabs(rule.token_weight ? rule.token_weight[pairs.token[p]] : pairs.weight[p]), 1e-20f);
  }
  salient_channels(activations, rows, weight.data(), mask, pairs.expert.data(), depth.data(), pairs.count(), channels,
                   rule.selection_ratio, experts, loaded);
  if (compute)
    for (std::int64_t p = 0; p < pairs.count(); ++p)
      for (std::int64_t c = 0; c < channels; ++c) compute[p * channels + c] &= loaded[pairs.expert[p] * channels + c];
}

std::int64_t group(const std::int64_t* expert, const std::int64_t* token, std::int64_t pairs, std::int64_t count,
                   std::int64_t* experts, std::int64_t* offsets, std::int64_t* tokens, std::int64_t* order) {
  std::vector<std::int64_t> next(count + 1, 0);
  for (std::int64_t i = 0; i < pairs; ++i) ++next[expert[i] + 1];
  std::int64_t loaded = 0;
  for (std::int64_t e = 0; e < count; ++e) {
    if (next[e + 1] > 0) {
      experts[loaded] = e;
      offsets[loaded++] = next[e];
    }
    next[e + 1] += next[e];
  }
  offsets[loaded] = pairs;
  for (std::int64_t i = 0; i < pairs; ++i) {
    std::int64_t at = next[expert[i]]++;
    order[at] = i;
    tokens[at] = token[i];
  }
  return loaded;
}

}  // namespace edgexpert
