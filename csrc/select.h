// Choosing channels, and sorting pairs: the torch functions of edgexpert/policy are the rules, these are the same sums without their
// sorts and copies.
#pragma once

#include <cstdint>

namespace edgexpert {

// Fine pruning (policy/pruning.py, needed_channels). The pairs of token t are [offsets[t], offsets[t + 1]); mask [pairs, channels].
void needed_channels(const float* activations, const float* weights, const std::int64_t* offsets, std::int64_t tokens,
                     std::int64_t channels, double share, bool* mask);

// Depth-aware coalescing (policy/coalescing.py, salient_channels); loaded [experts, channels] comes in false.
void salient_channels(const float* scores, const bool* mask, const std::int64_t* pair_expert,
                      const std::int64_t* pair_depth, std::int64_t pairs, std::int64_t channels, float selection_ratio,
                      std::int64_t experts, bool* loaded);

// Sorts pairs by expert, stably: the experts that have some, where each one's pairs begin, and the order in which they now stand.
// Returns how many experts have some; arrays as in Pairs of kernels.h, with room for all `count` experts.
std::int64_t group(const std::int64_t* expert, const std::int64_t* token, std::int64_t pairs, std::int64_t count,
                   std::int64_t* experts, std::int64_t* offsets, std::int64_t* tokens, std::int64_t* order);

}  // namespace edgexpert
