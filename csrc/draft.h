// What an EAGLE-3 draft computes besides its output head's product, in one call each: its decoder layer, and the likeliest tokens.
#pragma once

#include <cstdint>

#include "layer.h"

namespace edgexpert {

// Attention reads the normed embedding of a token and the normed state of the token before it side by side, and adds to the state.
struct DraftLayer {
  AttentionLayer attention;  // queries, keys and values read 2 * hidden channels, the embedding's first
  Weights gate, up, down;
  const float *embedding_norm, *state_norm, *mlp_norm;  // [hidden]
  bool norm_before_residual;                            // attention adds to the normed state
  float eps;
};

// out [tokens, hidden]: the states of tokens with these embeddings and states before them, [tokens, hidden] each.
void draft_layer(const DraftLayer& layer, const float* embeddings, const float* states, std::int64_t tokens, const Context& context,
                 float* out);

// The k likeliest of n tokens in each row of logits, best first, of equal ones the first; ids and log-probabilities are [rows, k].
void top_log_probs(const float* logits, std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t* ids, float* log_probs);

}  // namespace edgexpert
