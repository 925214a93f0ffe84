#include "draft.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "dense.h"
#include "isa.h"
#include "pool.h"

namespace edgexpert {
namespace {

// Rotates heads [heads, dim] by halves.
void rotate(const float* x, const float* cos, const float* sin, std::int64_t heads, std::int64_t dim, float* out, std::int64_t stride) {
  const std::int64_t half = dim / 2;
  for (std::int64_t head = 0; head < heads; ++head, x += dim, out += stride)
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      out[i] = a * cos[i] - b * sin[i];
      out[i + half] = b * cos[i] + a * sin[i];
    }
}

// out [tokens, hidden] = attention of x [tokens, 2 * hidden].
void attend(const DraftLayer& layer, const float* x, std::int64_t tokens, const float* cos, const float* sin, float* keys,
            float* values, std::int64_t capacity, std::int64_t length, const bool* mask, float* out) {
  const std::int64_t dim = layer.dim, query_width = layer.heads * dim, key_width = layer.kv_heads * dim;
  thread_local std::vector<float> query, key, value, attended;
  query.resize(tokens * query_width);
  key.resize(tokens * key_width);
  value.resize(tokens * key_width);
  attended.resize(tokens * query_width);
  linear(layer.query, x, tokens, layer.query_bias, query.data());
  linear(layer.key, x, tokens, layer.key_bias, key.data());
  linear(layer.value, x, tokens, layer.value_bias, value.data());
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float *token_cos = cos + t * dim / 2, *token_sin = sin + t * dim / 2;
    float* token_query = query.data() + t * query_width;
    rotate(token_query, token_cos, token_sin, layer.heads, dim, token_query, dim);
    rotate(key.data() + t * key_width, token_cos, token_sin, layer.kv_heads, dim, keys + (length + t) * dim, capacity * dim);
    for (std::int64_t head = 0; head < layer.kv_heads; ++head)
      std::copy_n(value.data() + t * key_width + head * dim, dim, values + (head * capacity + length + t) * dim);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  attention({query.data(), keys, values, dim, query_width, capacity * dim, dim, capacity * dim, dim, mask, attended.data(),
             layer.heads, layer.kv_heads, tokens, length + tokens, dim, dim, scale});
  linear(layer.output, attended.data(), tokens, layer.output_bias, out);
}

void add(const float* x, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] + out[i];
}

constexpr std::int64_t kBlock = 64;

float largest(const float* x, std::int64_t n) {
  if (n < kBlock) return *std::max_element(x, x + n);
  float most[8];  // of every eighth value, so that the compiler compares eight at a time
  std::copy_n(x, 8, most);
  for (std::int64_t i = 8; i < kBlock; i += 8)
    for (std::int64_t lane = 0; lane < 8; ++lane) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
  return *std::max_element(most, most + 8);
}

// One row of top_log_probs. The k best stand in the k blocks with the highest peaks: from any other block, each peak of these
// comes before all values.
void top_of_row(const float* x, std::int64_t n, std::int64_t k, std::int64_t* ids, float* log_probs) {
  const std::int64_t blocks = (n + kBlock - 1) / kBlock, kept = std::min(k, blocks);
  thread_local std::vector<float> peaks;
  thread_local std::vector<std::int64_t> ranking, candidates;
  peaks.resize(blocks);
  for (std::int64_t b = 0; b < blocks; ++b) peaks[b] = largest(x + b * kBlock, std::min(kBlock, n - b * kBlock));
  const auto by = [](const float* values) {
    return [values](std::int64_t a, std::int64_t b) { return values[a] > values[b] || (values[a] == values[b] && a < b); };
  };
  ranking.resize(blocks);
  std::iota(ranking.begin(), ranking.end(), 0);
  std::partial_sort(ranking.begin(), ranking.begin() + kept, ranking.end(), by(peaks.data()));
  candidates.clear();
  for (std::int64_t i = 0; i < kept; ++i)
    for (std::int64_t at = ranking[i] * kBlock; at < std::min(n, (ranking[i] + 1) * kBlock); ++at) candidates.push_back(at);
  std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), by(x));

  const float top = x[candidates[0]], log_sum = std::log(isa().exp_sum(x, n, top));
  for (std::int64_t i = 0; i < k; ++i) {
    ids[i] = candidates[i];
    log_probs[i] = x[candidates[i]] - top - log_sum;
  }
}

}  // namespace

void draft_layer(const DraftLayer& layer, const float* embeddings, const float* states, std::int64_t tokens, const float* cos,
                 const float* sin, float* keys, float* values, std::int64_t capacity, std::int64_t length, const bool* mask,
                 float* out) {
  const std::int64_t hidden = layer.output.outputs, size = tokens * hidden, width = layer.gate.outputs;
  thread_local std::vector<float> normed_embeddings, normed, both, between, gate, up;
  normed_embeddings.resize(size);
  normed.resize(size);
  both.resize(2 * size);
  between.resize(size);
  gate.resize(tokens * width);
  up.resize(tokens * width);

  rms_norm(embeddings, layer.embedding_norm, normed_embeddings.data(), tokens, hidden, layer.eps);
  rms_norm(states, layer.state_norm, normed.data(), tokens, hidden, layer.eps);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::copy_n(normed_embeddings.data() + t * hidden, hidden, both.data() + 2 * t * hidden);
    std::copy_n(normed.data() + t * hidden, hidden, both.data() + (2 * t + 1) * hidden);
  }
  attend(layer, both.data(), tokens, cos, sin, keys, values, capacity, length, mask, between.data());
  add(layer.norm_before_residual ? normed.data() : states, size, between.data());

  rms_norm(between.data(), layer.mlp_norm, normed.data(), tokens, hidden, layer.eps);
  linear(layer.gate, normed.data(), tokens, nullptr, gate.data());
  linear(layer.up, normed.data(), tokens, nullptr, up.data());
  parallel_for(tokens, [gates = gate.data(), ups = up.data(), width](std::int64_t t, int) {
    float *token_gate = gates + t * width, *token_up = ups + t * width;
    isa().activate(Activation::silu, false, token_gate, width, token_gate);
    for (std::int64_t i = 0; i < width; ++i) token_up[i] *= token_gate[i];
  });
  linear(layer.down, up.data(), tokens, nullptr, out);
  add(between.data(), size, out);
}

void top_log_probs(const float* logits, std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t* ids, float* log_probs) {
  parallel_for(rows, [&](std::int64_t r, int) { top_of_row(logits + r * n, n, k, ids + r * k, log_probs + r * k); });
}

}  // namespace edgexpert
