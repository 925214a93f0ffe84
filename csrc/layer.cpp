#include "layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "dense.h"
#include "select.h"

namespace edgexpert {
namespace {

void normalise(const float* weight, bool per_head, float* x, std::int64_t tokens, std::int64_t heads, std::int64_t dim, float eps) {
  if (!weight) return;
  if (per_head)
    rms_norm(x, weight, x, tokens * heads, dim, eps);
  else
    rms_norm(x, weight, x, tokens, heads * dim, eps);
}

// Rotates a head [dim] by halves: (a, b) -> (a cos - b sin, b cos + a sin).
void rotate(const float* x, const float* cos, const float* sin, std::int64_t dim, float* out) {
  const std::int64_t half = dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = a * cos[i] - b * sin[i];
    out[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

}  // namespace

void attention_layer(const AttentionLayer& layer, const float* x, std::int64_t tokens, const float* cos, const float* sin,
                     float* keys, float* values, std::int64_t capacity, std::int64_t length, const bool* mask, float* out) {
  const std::int64_t hidden = layer.query.channels, dim = layer.dim;
  const std::int64_t query_width = layer.heads * dim, key_width = layer.kv_heads * dim;
  thread_local std::vector<float> normed, query, key, value, attended;
  normed.resize(tokens * hidden);
  query.resize(tokens * query_width);
  key.resize(tokens * key_width);
  value.resize(tokens * key_width);
  attended.resize(tokens * query_width);

  rms_norm(x, layer.norm, normed.data(), tokens, hidden, layer.eps);
  linear(layer.query, normed.data(), tokens, layer.query_bias, query.data());
  linear(layer.key, normed.data(), tokens, layer.key_bias, key.data());
  linear(layer.value, normed.data(), tokens, layer.value_bias, value.data());
  normalise(layer.query_norm, layer.norm_per_head, query.data(), tokens, layer.heads, dim, layer.eps);
  normalise(layer.key_norm, layer.norm_per_head, key.data(), tokens, layer.kv_heads, dim, layer.eps);
  if (layer.clip > 0)
    for (auto* states : {&query, &key, &value})
      for (float& state : *states) state = std::clamp(state, -layer.clip, layer.clip);

  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t head = 0; head < layer.heads; ++head) {
      float* state = query.data() + t * query_width + head * dim;
      rotate(state, cos + t * dim, sin + t * dim, dim, state);
    }
    for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
      const std::int64_t from = t * key_width + head * dim, to = (head * capacity + length + t) * dim;
      rotate(key.data() + from, cos + t * dim, sin + t * dim, dim, keys + to);
      std::copy_n(value.data() + from, dim, values + to);
    }
  }
  attention({query.data(), keys, values, dim, query_width, capacity * dim, dim, capacity * dim, dim, mask, attended.data(),
             layer.heads, layer.kv_heads, tokens, length + tokens, dim, dim, layer.scale});
  linear(layer.output, attended.data(), tokens, layer.output_bias, out);
  for (std::int64_t i = 0; i < tokens * hidden; ++i) out[i] = x[i] + out[i] * layer.residual;
}

std::int64_t expert_layer(const ExpertLayer& layer, const float* x, std::int64_t tokens, float* out, std::int64_t* chosen,
                          float* weights) {
  const std::int64_t hidden = layer.gate_up.channels, count = layer.gate_up.count, k = layer.top_k, pairs = tokens * k;
  thread_local std::vector<float> normed, logits, by_expert;
  thread_local std::vector<std::int64_t> ranking, token, ids, offsets, tokens_by_expert, order;
  normed.resize(tokens * hidden);
  logits.resize(tokens * count);
  rms_norm(x, layer.norm, normed.data(), tokens, hidden, layer.eps);
  float_linear(normed.data(), layer.router, logits.data(), tokens, hidden, count);

  ranking.resize(count);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = logits.data() + t * count;
    std::iota(ranking.begin(), ranking.end(), 0);
    std::partial_sort(ranking.begin(), ranking.begin() + k, ranking.end(),
                      [&](std::int64_t a, std::int64_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
    const float top = row[ranking[0]];
    float all = 0, sum = 0;
    for (std::int64_t e = 0; e < count; ++e) all += std::exp(row[e] - top);
    for (std::int64_t i = 0; i < k; ++i) {
      const float logit = row[ranking[i]];
      chosen[t * k + i] = ranking[i];
      weights[t * k + i] = layer.sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : std::exp(logit - top) / all;
      sum += weights[t * k + i];
    }
    for (std::int64_t i = 0; i < k; ++i) weights[t * k + i] *= layer.normalise ? layer.router_scale / sum : layer.router_scale;
  }

  token.resize(pairs);
  for (std::int64_t i = 0; i < pairs; ++i) token[i] = i / k;
  ids.resize(count);
  offsets.resize(count + 1);
  tokens_by_expert.resize(pairs);
  order.resize(pairs);
  by_expert.resize(pairs);
  const std::int64_t loaded =
      group(chosen, token.data(), pairs, count, ids.data(), offsets.data(), tokens_by_expert.data(), order.data());
  for (std::int64_t i = 0; i < pairs; ++i) by_expert[i] = weights[order[i]];
  experts(layer.gate_up, layer.down, normed.data(), tokens, {loaded, ids.data(), offsets.data(), tokens_by_expert.data()}, {},
          layer.gate_up_bias, layer.down_bias, layer.activation, layer.gated, by_expert.data(), out);
  for (std::int64_t i = 0; i < tokens * hidden; ++i) out[i] = x[i] + out[i] * layer.residual;
  return loaded;
}

std::vector<std::int64_t> layer_stack(const LayerStack& stack, const float* x, std::int64_t tokens, const float* cos,
                                      const float* sin, float* keys, float* values, std::int64_t capacity, std::int64_t length,
                                      const bool* mask, const std::vector<std::int64_t>& fused, float* features, float* out,
                                      std::int64_t* experts, float* weights) {
  const AttentionLayer& first = stack.layers.front().attention;
  const std::int64_t hidden = first.query.channels, cache = first.kv_heads * capacity * first.dim;
  const std::int64_t chosen = tokens * stack.layers.front().experts.top_k, count = static_cast<std::int64_t>(fused.size());
  thread_local std::vector<float> between;
  between.resize(tokens * hidden);
  const auto keep = [&](std::int64_t layer) {
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t t = 0; fused[i] == layer && t < tokens; ++t)
        std::copy_n(x + t * hidden, hidden, features + (t * count + i) * hidden);
  };
  std::vector<std::int64_t> loaded;
  for (const auto& [attention, moe] : stack.layers) {
    const auto layer = static_cast<std::int64_t>(loaded.size());
    keep(layer);
    attention_layer(attention, x, tokens, cos, sin, keys + layer * cache, values + layer * cache, capacity, length, mask,
                    between.data());
    loaded.push_back(expert_layer(moe, between.data(), tokens, out, experts + layer * chosen, weights + layer * chosen));
    x = out;
  }
  keep(static_cast<std::int64_t>(loaded.size()));
  return loaded;
}

}  // namespace edgexpert
