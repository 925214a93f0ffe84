// The attention half of a decoder layer in one call: norm, projections, rotation, cache, attention, residual. Each step is the kernel
// of the same name; together they spare a small model's layer a dozen crossings between Python and here.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace edgexpert {

struct AttentionLayer {
  Weights query, key, value, output;
  const float *query_bias, *key_bias, *value_bias, *output_bias;  // or null
  const float* norm;                                             // [hidden]
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

}  // namespace edgexpert
