// Decoder layers in one call. Each step is the kernel of the same name; together they spare a layer some thirty crossings between
// Python and here, which in a small model take longer than its weights.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "select.h"

namespace edgexpert {

// What the tokens of a stage attend to, the same in all layers. Keys and values [kv_heads, capacity, dim] are those of one layer, or
// in layer_stack [layers, ...]; a stage appends its own behind `length` tokens.
struct Context {
  const float *cos, *sin;  // [tokens, dim]
  float *keys, *values;
  std::int64_t capacity, length;
  const bool* mask;  // [tokens, length + tokens]; null for a text
};

struct AttentionLayer {
  Weights query, key, value, output;
  const float *query_bias, *key_bias, *value_bias, *output_bias;  // or null
  const float* norm;                                             // [hidden]; not for attend
  const float *query_norm, *key_norm;  // [dim] or over all heads together, or null
  bool norm_per_head;
  std::int64_t heads, kv_heads, dim;
  float eps, scale, residual;
  float clip;  // queries, keys and values are clamped to it; 0 for no clamp
};

// out [tokens, hidden] = x + residual * attention(norm(x)).
void attention_layer(const AttentionLayer& layer, const float* x, std::int64_t tokens, const Context& context, float* out);
// The same between norm and residual: out = attention(x), for x [tokens, layer.query.channels].
void attend(const AttentionLayer& layer, const float* x, std::int64_t tokens, const Context& context, float* out);

// Told which experts of a layer are about to be read and when that is over; `use` may load them first.
class ExpertStore {
 public:
  virtual ~ExpertStore() = default;
  virtual void use(std::int64_t layer, const std::int64_t* experts, std::int64_t count) = 0;
  virtual void release(std::int64_t layer, const std::int64_t* experts, std::int64_t count) = 0;
};

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
  std::int64_t number = 0;       // of the layer, for the store
  ExpertStore* store = nullptr;  // null where all experts are in memory to stay
};

// What a policy decides in one layer, or in all layers behind each other.
struct Decision {
  std::int64_t* experts;   // of each token, [tokens, top_k]; the number of experts stands for none
  float* weights;          // [tokens, top_k]
  bool *gate_up, *down;    // loaded channels, [experts, channels]; null where all are
  bool *gate_up_compute, *down_compute;  // channels that a pair computes on, token by token, [tokens * top_k, channels]; or null
  std::int64_t* read;      // input channels of gate/up that are loaded, the groups that they lie in; the same of down
};

// What somebody who watches gets to see of one layer, or of all layers behind each other.
struct Observation {
  float* logits;       // of the router, [tokens, experts]
  float* inputs;       // of gate/up, [tokens, hidden]
  float* down_inputs;  // of each pair, token by token, [tokens * top_k, channels of down]
};

// What an expert layer is given beside its input, and fills in.
struct Choice {
  std::int64_t* experts;  // what the router alone chose, [tokens, top_k], best first
  float* weights;         // [tokens, top_k]
  const StageRule* rule;         // what a policy does; null where it leaves the stage to the router
  Decision decision;             // with a rule
  const Observation* observed;   // or null

  Choice of_layer(std::int64_t layer, std::int64_t tokens, const ExpertLayer& sizes, Observation& own) const;
};

// out [tokens, hidden] = x + residual * experts(norm(x)). Returns how many experts were loaded.
std::int64_t expert_layer(const ExpertLayer& layer, const float* x, std::int64_t tokens, const Choice& choice, float* out);

// Decoder layers behind each other, of the same sizes.
struct LayerStack {
  struct Layer {
    const AttentionLayer* attention;
    const ExpertLayer* experts;
  };
  std::vector<Layer> layers;
};

// All layers of a stage; arrays of `context` and `choice` are [layers, ...]. The inputs of some layers, or of what comes after the
// last one, are put side by side into features [tokens, fused.size() * hidden]. Returns how many experts each layer loaded.
std::vector<std::int64_t> layer_stack(const LayerStack& stack, const float* x, std::int64_t tokens, const Context& context,
                                      const std::vector<std::int64_t>& fused, float* features, const Choice& choice, float* out);

}  // namespace edgexpert
