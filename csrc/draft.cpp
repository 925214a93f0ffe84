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

void draft_layer(const DraftLayer& layer, const float* embeddings, const float* states, std::int64_t tokens, const Context& context,
                 float* out) {
  const std::int64_t hidden = layer.attention.output.outputs, size = tokens * hidden, width = layer.gate.outputs;
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
  attend(layer.attention, both.data(), tokens, context, between.data());
  add(layer.norm_before_residual ? normed.data() : states, size, between.data());

  rms_norm(between.data(), layer.mlp_norm, normed.data(), tokens, hidden, layer.eps);
  linear({{layer.gate, nullptr, gate.data()}, {layer.up, nullptr, up.data()}}, normed.data(), tokens, &layer.down);
  parallel_for(tokens, [gates = gate.data(), ups = up.data(), width](std::int64_t t, int) {
    float *token_gate = gates + t * width, *token_up = ups + t * width;
    isa().activate(Activation::silu, false, token_gate, width, token_gate);
    for (std::int64_t i = 0; i < width; ++i) token_up[i] *= token_gate[i];
  });
  linear({{layer.down, nullptr, out}}, up.data(), tokens);
  add(between.data(), size, out);
}

void top_log_probs(const float* logits, std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t* ids, float* log_probs) {
  parallel_for(rows, [&](std::int64_t r, int) { top_of_row(logits + r * n, n, k, ids + r * k, log_probs + r * k); });
}

}  // namespace edgexpert
