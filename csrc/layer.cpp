#include "layer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dense.h"
#include "pool.h"

namespace edgexpert {
namespace {

void normalise(const float* weight, bool per_head, float* x, std::int64_t tokens, std::int64_t heads, std::int64_t dim, float eps) {
  if (!weight) return;
  if (per_head)
    rms_norm(x, weight, x, tokens * heads, dim, eps);
  else
    rms_norm(x, weight, x, tokens, heads * dim, eps);
}

// Rotates a head [dim] in its place, by halves: (a, b) -> (a cos - b sin, b cos + a sin).
void rotate(float* x, const float* __restrict cos, const float* __restrict sin, std::int64_t dim) {
  const std::int64_t half = dim / 2;
  float *__restrict first = x, *__restrict second = x + half;  // or the compiler takes one number at a time
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i + half] + a * sin[i + half];
  }
}

void add_residual(const float* x, float residual, std::int64_t count, float* out) {
  in_pieces(count, 8192, count, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) out[i] = x[i] + out[i] * residual;
  });
}

}  // namespace

void attend(const AttentionLayer& layer, const float* x, std::int64_t tokens, const Context& context, float* out) {
  const auto& [cos, sin, keys, values, capacity, length, mask] = context;
  const std::int64_t dim = layer.dim, query_width = layer.heads * dim, key_width = layer.kv_heads * dim;
  thread_local std::vector<float> query, key, value, attended;
  query.resize(tokens * query_width);
  key.resize(tokens * key_width);
  value.resize(tokens * key_width);
  attended.resize(tokens * query_width);

  linear({{layer.query, layer.query_bias, query.data()},
          {layer.key, layer.key_bias, key.data()},
          {layer.value, layer.value_bias, value.data()}},
         x, tokens, &layer.output);
  normalise(layer.query_norm, layer.norm_per_head, query.data(), tokens, layer.heads, dim, layer.eps);
  normalise(layer.key_norm, layer.norm_per_head, key.data(), tokens, layer.kv_heads, dim, layer.eps);
  if (layer.clip > 0)
    for (auto* states : {&query, &key, &value})
      for (float& state : *states) state = std::clamp(state, -layer.clip, layer.clip);

  in_pieces(tokens, 8, tokens * (query_width + 2 * key_width), [&, q = query.data(), k = key.data(), v = value.data(),
                                                           context](std::int64_t begin, std::int64_t end) {
    const auto& [cos, sin, keys, values, capacity, length, mask] = context;  // clang captures no structured bindings
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t head = 0; head < layer.heads; ++head)
        rotate(q + t * query_width + head * dim, cos + t * dim, sin + t * dim, dim);
      for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
        const std::int64_t from = t * key_width + head * dim, to = (head * capacity + length + t) * dim;
        rotate(k + from, cos + t * dim, sin + t * dim, dim);
        std::copy_n(k + from, dim, keys + to);
        std::copy_n(v + from, dim, values + to);
      }
    }
  });
  attention({query.data(), keys, values, dim, query_width, capacity * dim, dim, capacity * dim, dim, mask, attended.data(),
             layer.heads, layer.kv_heads, tokens, length + tokens, dim, dim, layer.scale});
  linear({{layer.output, layer.output_bias, out}}, attended.data(), tokens);
}

void attention_layer(const AttentionLayer& layer, const float* x, std::int64_t tokens, const Context& context, float* out) {
  const std::int64_t hidden = layer.query.channels;
  thread_local std::vector<float> normed;
  normed.resize(tokens * hidden);
  rms_norm(x, layer.norm, normed.data(), tokens, hidden, layer.eps);
  attend(layer, normed.data(), tokens, context, out);
  add_residual(x, layer.residual, tokens * hidden, out);
}

namespace {

// Norm and router: the states that experts read, the best experts of each token, and what it takes of them by what weights.
void route(const ExpertLayer& layer, const float* x, std::int64_t tokens, float* normed, float* logits, Ranking& ranking,
           std::int64_t* chosen, float* weights) {
  const std::int64_t hidden = layer.gate_up.channels, count = layer.gate_up.count(), k = layer.top_k, ranks = ranking.ranks;
  rms_norm(x, layer.norm, normed, tokens, hidden, layer.eps);
  float_linear(normed, layer.router, logits, tokens, hidden, count);
  ranking.experts.resize(tokens * ranks);
  ranking.gates.resize(tokens * ranks);
  in_pieces(tokens, 8, tokens * count * 32, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* row = logits + t * count;
      float* gates = ranking.gates.data() + t * ranks;
      std::int64_t* order = ranking.experts.data() + t * ranks;
      best_experts(row, nullptr, count, ranks, order);
      const float top = row[order[0]];
      float all = 0, sum = 0;
      for (std::int64_t e = 0; e < count; ++e) all += std::exp(row[e] - top);
      for (std::int64_t i = 0; i < ranks; ++i) {
        const float logit = row[order[i]];
        gates[i] = layer.sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : std::exp(logit - top) / all;
      }
      for (std::int64_t i = 0; i < k; ++i) sum += gates[i];
      for (std::int64_t i = 0; i < k; ++i) {
        chosen[t * k + i] = order[i];
        weights[t * k + i] = gates[i] * (layer.normalise ? layer.router_scale / sum : layer.router_scale);
      }
    }
  });
}

// A layer's pairs by expert; order[i] is the place of pair i of them in the order of tokens.
struct Grouped {
  std::vector<std::int64_t> ids, offsets, tokens, order;
  std::vector<float> weights;
  Pairs pairs;
};

const Grouped& group_pairs(const TokenPairs& pairs, std::int64_t experts) {
  thread_local Grouped by_expert;
  auto& [ids, offsets, tokens, order, weights, view] = by_expert;
  ids.resize(experts);
  offsets.resize(experts + 1);
  for (auto* column : {&tokens, &order}) column->resize(pairs.count());
  weights.resize(pairs.count());
  const std::int64_t loaded = group(pairs.expert.data(), pairs.token.data(), pairs.count(), experts, ids.data(), offsets.data(),
                                    tokens.data(), order.data());
  for (std::int64_t i = 0; i < pairs.count(); ++i) weights[i] = pairs.weight[order[i]];
  view = {loaded, ids.data(), offsets.data(), tokens.data()};
  return by_expert;
}

std::int64_t count(const bool* loaded, std::int64_t n) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(loaded);  // compilers vectorise these, not bools
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += bytes[i];
  return sum;
}

// Loaded channels, and groups that hold some of them.
void count_read(const Weights& w, const Pairs& pairs, const bool* loaded, std::int64_t* read) {
  const std::int64_t group = w.bits == 16 ? w.channels : w.group;
  read[0] = read[1] = 0;
  for (std::int64_t u = 0; u < pairs.loaded; ++u) {
    const bool* own = loaded ? loaded + pairs.experts[u] * w.channels : nullptr;
    for (std::int64_t g = 0; g < w.channels; g += group) {
      const std::int64_t channels = own ? count(own + g, std::min(group, w.channels - g)) : group;
      read[0] += channels;
      read[1] += channels > 0;
    }
  }
}

// The rows of `mask` [pairs, channels] in the order by expert; null for null.
const bool* reordered(const bool* mask, const std::vector<std::int64_t>& order, std::int64_t channels) {
  if (!mask) return nullptr;
  thread_local std::vector<std::uint8_t> rows;
  rows.resize(order.size() * channels);
  for (std::size_t i = 0; i < order.size(); ++i)
    std::copy_n(reinterpret_cast<const std::uint8_t*>(mask) + order[i] * channels, channels, rows.data() + i * channels);
  return reinterpret_cast<const bool*>(rows.data());
}

// Experts in use, for as long as this lives.
class InUse {
 public:
  InUse(const ExpertLayer& layer, const Pairs& pairs) : layer_(layer), pairs_(pairs) {
    if (layer.store) layer.store->use(layer.number, pairs.experts, pairs.loaded);
  }
  ~InUse() {
    if (layer_.store) layer_.store->release(layer_.number, pairs_.experts, pairs_.loaded);
  }
  InUse(const InUse&) = delete;

 private:
  const ExpertLayer& layer_;
  const Pairs& pairs_;
};

template <class T>
T* part(T* array, std::int64_t begin) {
  return array ? array + begin : nullptr;
}

}  // namespace

std::int64_t expert_layer(const ExpertLayer& layer, const float* x, std::int64_t tokens, const Choice& choice, float* out) {
  const std::int64_t hidden = layer.gate_up.channels, width = layer.down.channels, count = layer.gate_up.count(), k = layer.top_k;
  const StageRule* rule = choice.rule;
  const Decision& decision = choice.decision;
  const Observation* observed = choice.observed;
  thread_local std::vector<float> own_normed, own_logits, inner;
  thread_local Ranking ranking;
  thread_local TokenPairs routed;
  thread_local std::vector<std::int64_t> place;  // of each pair, token by token, among the pairs by expert
  if (!observed) {
    own_normed.resize(tokens * hidden);
    own_logits.resize(tokens * count);
  }
  float* normed = observed ? observed->inputs : own_normed.data();
  ranking.ranks = rule && rule->tiers ? std::max(k, rule->candidates[1]) : k;  // the trivial have most candidates
  route(layer, x, tokens, normed, observed ? observed->logits : own_logits.data(), ranking, choice.experts, choice.weights);
  if (rule) {
    std::copy_n(choice.experts, tokens * k, decision.experts);
    std::copy_n(choice.weights, tokens * k, decision.weights);
    choose_experts(*rule, ranking, layer.normalise, layer.router_scale, tokens, k, count, decision.experts, decision.weights);
    routed.read(decision.experts, decision.weights, tokens, k, count);
  } else {
    routed.read(choice.experts, choice.weights, tokens, k, count);
  }
  const Grouped& grouped = group_pairs(routed, count);
  const auto& [ids, offsets, tokens_by_expert, order, by_expert, pairs] = grouped;
  const InUse in_use(layer, pairs);

  const bool fine = rule && rule->fine;
  Selection gate_up_selection, down_selection;
  if (fine) {
    select_channels(*rule, normed, routed.token.data(), routed, hidden, count, decision.gate_up, decision.gate_up_compute);
    gate_up_selection = {decision.gate_up, reordered(decision.gate_up_compute, order, hidden)};
  }
  inner.resize(routed.count() * width);
  gate_up(layer.gate_up, normed, tokens, pairs, gate_up_selection, layer.gate_up_bias, layer.activation, layer.gated, inner.data(),
          fine ? nullptr : &layer.down);
  if (fine) {
    place.resize(routed.count());
    for (std::int64_t i = 0; i < routed.count(); ++i) place[order[i]] = i;
    select_channels(*rule, inner.data(), place.data(), routed, width, count, decision.down, decision.down_compute);
    down_selection = {decision.down, reordered(decision.down_compute, order, width)};
  }
  if (observed)
    for (std::int64_t i = 0; i < routed.count(); ++i)
      std::copy_n(inner.data() + i * width, width, observed->down_inputs + order[i] * width);
  down(layer.down, inner.data(), tokens, pairs, down_selection, layer.down_bias, by_expert.data(), out);
  add_residual(x, layer.residual, tokens * hidden, out);
  if (rule) {
    count_read(layer.gate_up, pairs, decision.gate_up, decision.read);
    count_read(layer.down, pairs, decision.down, decision.read + 2);
  }
  return pairs.loaded;
}

Choice Choice::of_layer(std::int64_t layer, std::int64_t tokens, const ExpertLayer& sizes, Observation& own) const {
  const std::int64_t hidden = sizes.gate_up.channels, width = sizes.down.channels, count = sizes.gate_up.count();
  const std::int64_t choices = layer * tokens * sizes.top_k;
  Choice choice{experts + choices, weights + choices, rule, {}, observed ? &own : nullptr};
  if (rule)
    choice.decision = {decision.experts + choices, decision.weights + choices,
                       part(decision.gate_up, layer * count * hidden), part(decision.down, layer * count * width),
                       part(decision.gate_up_compute, choices * hidden), part(decision.down_compute, choices * width),
                       decision.read + 4 * layer};
  if (observed)
    own = {observed->logits + layer * tokens * count, observed->inputs + layer * tokens * hidden,
           observed->down_inputs + choices * width};
  return choice;
}

std::vector<std::int64_t> layer_stack(const LayerStack& stack, const float* x, std::int64_t tokens, const Context& context,
                                      const std::vector<std::int64_t>& fused, float* features, const Choice& choice, float* out) {
  const AttentionLayer& first = *stack.layers.front().attention;
  const std::int64_t hidden = first.query.channels, cache = first.kv_heads * context.capacity * first.dim;
  const std::int64_t wanted = static_cast<std::int64_t>(fused.size());
  thread_local std::vector<float> between;
  between.resize(tokens * hidden);
  const auto keep = [&](std::int64_t layer) {
    for (std::int64_t i = 0; i < wanted; ++i)
      for (std::int64_t t = 0; fused[i] == layer && t < tokens; ++t)
        std::copy_n(x + t * hidden, hidden, features + (t * wanted + i) * hidden);
  };
  std::vector<std::int64_t> loaded;
  for (const auto& [attention, experts] : stack.layers) {
    const auto i = static_cast<std::int64_t>(loaded.size());
    keep(i);
    Context own = context;
    own.keys += i * cache;
    own.values += i * cache;
    Observation observed;
    attention_layer(*attention, x, tokens, own, between.data());
    loaded.push_back(expert_layer(*experts, between.data(), tokens, choice.of_layer(i, tokens, *experts, observed), out));
    x = out;
  }
  keep(static_cast<std::int64_t>(loaded.size()));
  return loaded;
}

}  // namespace edgexpert
