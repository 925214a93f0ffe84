// Decoder layers in one call. Each step is the kernel of the same name; together they spare a layer some thirty crossings between
// Python and here, which in a small model take longer than its weights.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "select.h"

namespace edgexpert {

struct AttentionLayer {
  Weights query, key, value, output;
  const float *query_bias, *key_bias, *value_bias, *output_bias;  // or null
  const float* norm;                                             // [hidden]; not for attend
  const float *query_norm, *key_norm;  // [norm_width or all heads together], or null
  bool norm_per_head;
  std::int64_t heads, kv_heads, dim;
  float eps, scale, residual;
  float clip;  // queries, keys and values are clamped to it; 0 for no clamp
};

// out [tokens, hidden] = x + residual * attention(norm(x)). Rotated keys and values are appended to the cache, [kv_heads, capacity, dim]
// each, behind `length` tokens. cos and sin are [tokens, dim]; mask is [tokens, length + tokens] or null for a text.
void attention_layer(const AttentionLayer& layer, const float* x, std::int64_t tokens, const float* cos, const float* sin,
                     float* keys, float* values, std::int64_t capacity, std::int64_t length, const bool* mask, float* out);
// The same between norm and residual: out = attention(x), for x [tokens, layer.query.channels].
void attend(const AttentionLayer& layer, const float* x, std::int64_t tokens, const float* cos, const float* sin, float* keys,
            float* values, std::int64_t capacity, std::int64_t length, const bool* mask, float* out);

// The expert half: norm, router, experts, residual; for routers that choose by their logits alone.
struct ExpertLayer {
  const float *norm, *router;  // [hidden], [experts, hidden]
  std::int64_t top_k;
  bool sigmoid;    // weights are sigmoids of the logits, else their softmax
  bool normalise;  // weights are divided by their sum over the chosen experts
  float eps, router_scale, residual;
  Weights gate_up, down;
  const float *gate_up_bias, *down_bias;  // or null
  Activation activation;
  bool gated;
};

// out [tokens, hidden] = x + residual * experts(norm(x)); what was chosen goes to experts and weights, [tokens, top_k], best first.
// Returns how many experts were loaded.
std::int64_t expert_layer(const ExpertLayer& layer, const float* x, std::int64_t tokens, float* out, std::int64_t* experts,
                          float* weights);

// What a policy decides in one layer, or in all layers behind each other.
struct Decision {
  std::int64_t* experts;   // of each token, [tokens, top_k]; the number of experts stands for none
  float* weights;          // [tokens, top_k]
  bool *gate_up, *down;    // loaded channels, [experts, channels]; null where all are
  bool *gate_up_compute, *down_compute;  // channels that a pair computes on, token by token, [tokens * top_k, channels]; or null
  std::int64_t* read;      // input channels of gate/up that are loaded, the groups that they lie in; the same of down
};

// The expert half under a policy; `experts` and `weights` are the router's own.
std::int64_t ruled_expert_layer(const ExpertLayer& layer, const StageRule& rule, const float* x, std::int64_t tokens, float* out,
                                 std::int64_t* experts, float* weights, const Decision& decision);

// Decoder layers behind each other, of the same sizes.
struct LayerStack {
  struct Layer {
    AttentionLayer attention;
    ExpertLayer experts;
  };
  std::vector<Layer> layers;
};

// Arguments as above. keys and values are [layers, kv_heads, capacity, dim], experts and weights [layers, tokens, top_k]. The inputs
// of some layers, or of what comes after the last one, are put side by side into features [tokens, fused.size() * hidden]. Without a
// rule all experts are the router's. Returns how many experts each layer loaded.
std::vector<std::int64_t> layer_stack(const LayerStack& stack, const float* x, std::int64_t tokens, const float* cos,
                                      const float* sin, float* keys, float* values, std::int64_t capacity, std::int64_t length,
                                      const bool* mask, const std::vector<std::int64_t>& fused, float* features, float* out,
                                      std::int64_t* experts, float* weights, const StageRule* rule, const Decision& decision);

}  // namespace edgexpert
