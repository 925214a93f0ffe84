// The Python module edgexpert.kernels._native. Tensors arrive as addresses, which costs far less per call than array objects;
// edgexpert/kernels/ is the only caller and checks types, shapes and layout first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "draft.h"
#include "isa.h"
#include "layer.h"
#include "pool.h"
#include "select.h"

namespace nb = nanobind;
using namespace edgexpert;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);  // ValueError in Python
}

// The ids decide which memory is touched, so they are checked in every call: a few comparisons for each pair.
Pairs pairs_of(std::int64_t loaded, std::int64_t count, Address experts, Address offsets, Address tokens, std::int64_t num_experts,
               std::int64_t num_tokens) {
  const Pairs pairs{loaded, at<const std::int64_t>(experts), at<const std::int64_t>(offsets), at<const std::int64_t>(tokens)};
  check(pairs.offsets[0] == 0 && pairs.offsets[loaded] == count, "the offsets do not end at the number of pairs");
  for (std::int64_t u = 0; u < loaded; ++u) {
    check(pairs.experts[u] >= 0 && pairs.experts[u] < num_experts, "an expert's id is out of range");
    check(pairs.offsets[u] <= pairs.offsets[u + 1], "the offsets do not ascend");
  }
  for (std::int64_t p = 0; p < count; ++p)
    check(pairs.tokens[p] >= 0 && pairs.tokens[p] < num_tokens, "a token's id is out of range");
  return pairs;
}

Selection selection_of(Address loaded, Address compute) { return {at<const bool>(loaded), at<const bool>(compute)}; }

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Matrix products with packed channel-major weights; see csrc/kernels.h.";

  nb::class_<Weights>(m, "Weights")
      .def(
          "__init__",
          [](Weights* self, Address values, Address scales, Address zeros, std::int64_t value_stride, std::int64_t scale_stride,
             std::int64_t zero_stride, std::int64_t count, std::int64_t channels, std::int64_t outputs, std::int64_t padded,
             int bits, std::int64_t group, std::int64_t tiles) {
            new (self) Weights{at<const std::uint8_t>(values), at<const std::uint16_t>(scales), at<const std::uint8_t>(zeros),
                               value_stride, scale_stride, zero_stride, count, channels, outputs, padded, bits, group, tiles};
          });

  m.def("isa", [] { return std::string(isa().name); });
  m.def("has_isa", [](const std::string& name) { return has_isa(name.c_str()); });
  m.def("select_isa", [](const std::string& name) { return select_isa(name.c_str()); });
  m.def("set_threads", &set_threads, nb::call_guard<nb::gil_scoped_release>());
  m.def("threads", &threads, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def("__init__",
           [](AttentionLayer* self, const Weights& query, const Weights& key, const Weights& value, const Weights& output,
              Address query_bias, Address key_bias, Address value_bias, Address output_bias, Address norm, Address query_norm,
              Address key_norm, bool norm_per_head, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim, float eps,
              float scale, float residual, float clip) {
             new (self) AttentionLayer{query, key, value, output, at<const float>(query_bias), at<const float>(key_bias),
                                       at<const float>(value_bias), at<const float>(output_bias), at<const float>(norm),
                                       at<const float>(query_norm), at<const float>(key_norm), norm_per_head, heads, kv_heads,
                                       dim, eps, scale, residual, clip};
           })
      .def(
          "run",
          [](const AttentionLayer& layer, Address x, std::int64_t tokens, Address cos, Address sin, Address keys, Address values,
             std::int64_t capacity, std::int64_t length, Address mask, Address out) {
            attention_layer(layer, at<const float>(x), tokens, at<const float>(cos), at<const float>(sin), at<float>(keys),
                            at<float>(values), capacity, length, at<const bool>(mask), at<float>(out));
          },
          nb::call_guard<nb::gil_scoped_release>());

  nb::class_<ExpertLayer>(m, "ExpertLayer")
      .def("__init__",
           [](ExpertLayer* self, Address norm, Address router, std::int64_t top_k, bool sigmoid, bool normalise, float eps,
              float router_scale, float residual, const Weights& gate_up, const Weights& down, Address gate_up_bias,
              Address down_bias, int activation, bool gated) {
             new (self) ExpertLayer{at<const float>(norm), at<const float>(router), top_k, sigmoid, normalise, eps, router_scale,
                                    residual, gate_up, down, at<const float>(gate_up_bias), at<const float>(down_bias),
                                    static_cast<Activation>(activation), gated};
           })
      .def(
          "run",
          [](const ExpertLayer& layer, Address x, std::int64_t tokens, Address out, Address experts, Address weights) {
            return expert_layer(layer, at<const float>(x), tokens, at<float>(out), at<std::int64_t>(experts), at<float>(weights));
          },
          nb::call_guard<nb::gil_scoped_release>());

  nb::class_<DraftLayer>(m, "DraftLayer")
      .def("__init__",
           [](DraftLayer* self, const AttentionLayer& attention, const Weights& gate, const Weights& up, const Weights& down,
              Address embedding_norm, Address state_norm, Address mlp_norm, bool norm_before_residual, float eps) {
             new (self) DraftLayer{attention, gate, up, down, at<const float>(embedding_norm), at<const float>(state_norm),
                                   at<const float>(mlp_norm), norm_before_residual, eps};
           })
      .def(
          "run",
          [](const DraftLayer& layer, Address embeddings, Address states, std::int64_t tokens, Address cos, Address sin,
             Address keys, Address values, std::int64_t capacity, std::int64_t length, Address mask, Address out) {
            draft_layer(layer, at<const float>(embeddings), at<const float>(states), tokens, at<const float>(cos),
                        at<const float>(sin), at<float>(keys), at<float>(values), capacity, length, at<const bool>(mask),
                        at<float>(out));
          },
          nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "top_log_probs",
      [](Address logits, std::int64_t rows, std::int64_t n, std::int64_t k, Address ids, Address log_probs) {
        top_log_probs(at<const float>(logits), rows, n, k, at<std::int64_t>(ids), at<float>(log_probs));
      },
      nb::call_guard<nb::gil_scoped_release>());

  nb::class_<StageRule>(m, "StageRule")
      .def("__init__", [](StageRule* self, Address tiers, std::int64_t minor_candidates, std::int64_t minor_taken,
                          std::int64_t trivial_candidates, std::int64_t trivial_taken, Address keep, bool fine, double keep_channels,
                          bool coalesce, float selection_ratio, Address depth, Address token_weight) {
        new (self) StageRule{at<const std::int64_t>(tiers), {minor_candidates, trivial_candidates}, {minor_taken, trivial_taken},
                             at<const bool>(keep), fine, keep_channels, coalesce, selection_ratio, at<const std::int64_t>(depth),
                             at<const float>(token_weight)};
      });

  nb::class_<LayerStack>(m, "LayerStack")
      .def(nb::init<>())
      .def("add", [](LayerStack& stack, const AttentionLayer& attention,
                     const ExpertLayer& experts) { stack.layers.push_back({attention, experts}); })
      .def(
          "run",
          [](const LayerStack& stack, Address x, std::int64_t tokens, Address cos, Address sin, Address keys, Address values,
             std::int64_t capacity, std::int64_t length, Address mask, const std::vector<std::int64_t>& fused, Address features,
             Address out, Address experts, Address weights, const StageRule* rule, const std::vector<Address>& decision) {
            Decision decided{};
            if (rule)
              decided = {at<std::int64_t>(decision.at(0)), at<float>(decision.at(1)), at<bool>(decision.at(2)),
                         at<bool>(decision.at(3)), at<bool>(decision.at(4)), at<bool>(decision.at(5)),
                         at<std::int64_t>(decision.at(6))};
            return layer_stack(stack, at<const float>(x), tokens, at<const float>(cos), at<const float>(sin), at<float>(keys),
                               at<float>(values), capacity, length, at<const bool>(mask), fused, at<float>(features), at<float>(out),
                               at<std::int64_t>(experts), at<float>(weights), rule, decided);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::call_guard<nb::gil_scoped_release>());

  m.def("group", [](std::int64_t pairs, std::int64_t count, Address expert, Address token, Address experts, Address offsets,
                    Address tokens, Address order) {
    for (std::int64_t i = 0; i < pairs; ++i)
      check(at<const std::int64_t>(expert)[i] >= 0 && at<const std::int64_t>(expert)[i] < count, "an expert's id is out of range");
    return group(at<const std::int64_t>(expert), at<const std::int64_t>(token), pairs, count, at<std::int64_t>(experts),
                 at<std::int64_t>(offsets), at<std::int64_t>(tokens), at<std::int64_t>(order));
  });
  m.def(
      "linear",
      [](const Weights& w, Address x, std::int64_t rows, Address bias, Address out) {
        linear({{w, at<const float>(bias), at<float>(out)}}, at<const float>(x), rows);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gate_up",
      [](const Weights& w, Address x, std::int64_t tokens, std::int64_t loaded_experts, std::int64_t pairs, Address experts,
         Address offsets, Address pair_tokens, Address loaded, Address compute, Address bias, int activation, bool gated, Address out) {
        gate_up(w, at<const float>(x), tokens, pairs_of(loaded_experts, pairs, experts, offsets, pair_tokens, w.count, tokens),
                selection_of(loaded, compute), at<const float>(bias), static_cast<Activation>(activation), gated, at<float>(out));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "down",
      [](const Weights& w, Address x, std::int64_t tokens, std::int64_t loaded_experts, std::int64_t pairs, Address experts,
         Address offsets, Address pair_tokens, Address loaded, Address compute, Address bias, Address weights, Address out) {
        down(w, at<const float>(x), tokens, pairs_of(loaded_experts, pairs, experts, offsets, pair_tokens, w.count, tokens),
             selection_of(loaded, compute), at<const float>(bias), at<const float>(weights), at<float>(out));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "experts",
      [](const Weights& up, const Weights& down, Address x, std::int64_t tokens, std::int64_t loaded_experts, std::int64_t pairs,
         Address ids, Address offsets, Address pair_tokens, Address loaded, Address compute, Address up_bias, Address down_bias,
         int activation, bool gated, Address weights, Address out) {
        experts(up, down, at<const float>(x), tokens, pairs_of(loaded_experts, pairs, ids, offsets, pair_tokens, up.count, tokens),
                selection_of(loaded, compute), at<const float>(up_bias), at<const float>(down_bias),
                static_cast<Activation>(activation), gated, at<const float>(weights), at<float>(out));
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "rms_norm",
      [](Address x, Address weight, Address out, std::int64_t rows, std::int64_t n, float eps) {
        rms_norm(at<const float>(x), at<const float>(weight), at<float>(out), rows, n, eps);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "float_linear",
      [](Address x, Address weight, Address out, std::int64_t rows, std::int64_t n, std::int64_t outputs) {
        float_linear(at<const float>(x), at<const float>(weight), at<float>(out), rows, n, outputs);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "attention",
      [](Address query, std::int64_t query_head, std::int64_t query_token, Address key, std::int64_t key_head,
         std::int64_t key_token, Address value, std::int64_t value_head, std::int64_t value_token, Address mask, Address out,
         std::int64_t heads, std::int64_t kv_heads, std::int64_t tokens, std::int64_t keys, std::int64_t dim,
         std::int64_t value_dim, float scale) {
        attention({at<const float>(query), at<const float>(key), at<const float>(value), query_head, query_token, key_head,
                   key_token, value_head, value_token, at<const bool>(mask), at<float>(out), heads, kv_heads, tokens, keys, dim,
                   value_dim, scale});
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "needed_channels",
      [](Address activations, Address weights, Address offsets, std::int64_t tokens, std::int64_t channels, double share,
         Address mask) {
        needed_channels(at<const float>(activations), nullptr, at<const float>(weights), at<const std::int64_t>(offsets), tokens, channels,
                        share, at<bool>(mask));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "choose_experts",
      [](const StageRule& rule, Address choice, Address gate, bool normalise, float scale, std::int64_t tokens, std::int64_t k,
         std::int64_t experts, Address chosen, Address weights) {
        choose_experts(rule, at<const float>(choice), at<const float>(gate), normalise, scale, tokens, k, experts,
                       at<std::int64_t>(chosen), at<float>(weights));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "salient_channels",
      [](Address scores, Address mask, Address pair_expert, Address pair_depth, std::int64_t pairs, std::int64_t channels,
         float selection_ratio, std::int64_t experts, Address loaded) {
        salient_channels(at<const float>(scores), nullptr, nullptr, at<const bool>(mask),
                         at<const std::int64_t>(pair_expert), at<const std::int64_t>(pair_depth), pairs, channels,
                         selection_ratio, experts, at<bool>(loaded));
      },
      nb::call_guard<nb::gil_scoped_release>());

  // Yardsticks of benchmarks/native_kernels.py.
  m.def(
      "read_memory",
      [](Address bytes, std::int64_t n) {
        const std::int64_t part = (n / (8 * threads()) + 255) / 256 * 256;
        parallel_for((n + part - 1) / part, [&](std::int64_t i, int) {
          const std::int64_t length = i * part + part < n ? part : (n - i * part) / 256 * 256;
          volatile std::uint64_t keep = isa().read(at<const std::uint8_t>(bytes) + i * part, length);
          (void)keep;
        });
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "multiply_in_registers",
      [](std::int64_t rounds) {
        std::atomic<std::int64_t> done{0};
        parallel_for(8 * threads(), [&](std::int64_t, int) { done += isa().peak(rounds); });
        return done.load();
      },
      nb::call_guard<nb::gil_scoped_release>());
}
