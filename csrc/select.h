// Choosing experts and channels, and sorting pairs: the torch functions of edgexpert/policy are the rules, these are the same sums
// without their sorts and copies.
#pragma once

#include <cstdint>
#include <vector>

namespace edgexpert {

// Fine pruning (policy/pruning.py, needed_channels). The pairs of token t are [offsets[t], offsets[t + 1]), and the activations of
// pair p are row rows[p] of `activations`, or row p where rows is null; mask [pairs, channels].
void needed_channels(const float* activations, const std::int64_t* rows, const float* weights, const std::int64_t* offsets,
                     std::int64_t tokens, std::int64_t channels, double share, bool* mask);

// Depth-aware coalescing (policy/coalescing.py, salient_channels) of scores |activation| * weight; a null `weights` counts as ones.
// loaded [experts, channels] comes in false.
void salient_channels(const float* activations, const std::int64_t* rows, const float* weights, const bool* mask,
                      const std::int64_t* pair_expert, const std::int64_t* pair_depth, std::int64_t pairs, std::int64_t channels,
                      float selection_ratio, std::int64_t experts, bool* loaded);

// What a policy does to a stage (policy/policy.py, Policy.route and Policy.select_channels).
struct StageRule {
  const std::int64_t* tiers;  // prompt-wise expert reuse: 0 for major tokens, 1 minor, 2 trivial, [tokens]; null for no reuse
  std::int64_t candidates[2], taken[2];  // of a minor and a trivial token: it takes so many of so many best experts
  const bool* keep;           // coarse pruning: tokens whose experts stay, [tokens]; null for all
  bool fine;                  // whether channels are selected
  double keep_channels;       // share of a token's importance that its channels hold
  bool coalesce;              // whether the candidates of a depth share what is loaded
  float selection_ratio;
  const std::int64_t* depth;  // [tokens]
  const float* token_weight;  // of the channel score, [tokens]; null for the routing weights
};

// The pairs of a stage token by token.
struct TokenPairs {
  std::vector<std::int64_t> expert, token, offsets;  // offsets [tokens + 1]
  std::vector<float> weight;

  // From what each token chose, [tokens, k]; `experts` stands for no expert.
  void read(const std::int64_t* chosen, const float* weights, std::int64_t tokens, std::int64_t k, std::int64_t experts);
  std::int64_t count() const { return static_cast<std::int64_t>(expert.size()); }
};

// The best of a token's experts, best first, equal ones by number; where `own` [experts] is given, those come before all others.
void best_experts(const float* choice, const char* own, std::int64_t experts, std::int64_t ranks, std::int64_t* best);

// The best experts of each token, [tokens, ranks], best first, and their weights before normalisation; `experts` is no expert.
struct Ranking {
  std::int64_t ranks;
  std::vector<std::int64_t> experts;
  std::vector<float> gates;
};

// Prompt-wise expert reuse (policy/reuse.py) and coarse pruning (policy/pruning.py, prune_experts) of the first k experts of each
// token. `chosen` and `weights` [tokens, k] come in as the router's own; weights of other choices are normalised over them where
// the router itself normalises.
void choose_experts(const StageRule& rule, const Ranking& ranking, bool normalise, float scale, std::int64_t tokens, std::int64_t k,
                    std::int64_t experts, std::int64_t* chosen, float* weights);

// The same by a router's scores [tokens, experts]: what it ranks by, -inf where it forbids an expert, and weights before normalisation.
// The router's own choice ranks before all others.
void choose_experts(const StageRule& rule, const float* choice, const float* gate, bool normalise, float scale, std::int64_t tokens,
                    std::int64_t k, std::int64_t experts, std::int64_t* chosen, float* weights);

// Fine pruning and coalescing of one matrix: loaded [experts, channels] is filled in, and compute [pairs, channels] unless it is null.
void select_channels(const StageRule& rule, const float* activations, const std::int64_t* rows, const TokenPairs& pairs,
                     std::int64_t channels, std::int64_t experts, bool* loaded, bool* compute);

// Sorts pairs by expert, stably: the experts that have some, where each one's pairs begin, and the order in which they now stand.
// Returns how many experts have some; arrays as in Pairs of kernels.h, with room for all `count` experts.
std::int64_t group(const std::int64_t* expert, const std::int64_t* token, std::int64_t pairs, std::int64_t count,
                   std::int64_t* experts, std::int64_t* offsets, std::int64_t* tokens, std::int64_t* order);

}  // namespace edgexpert
