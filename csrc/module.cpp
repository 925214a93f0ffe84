// What Python sees: one class for each struct of the headers, with named arguments, and the functions. Objects keep the arrays alive
// that they point into. Ids and sizes decide which memory is touched, so they are checked before it is.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "arrays.h"
#include "draft.h"
#include "isa.h"
#include "layer.h"
#include "pool.h"
#include "select.h"

using namespace edgexpert;

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

// An argument as it is: nanobind would copy an array of another type or layout, and what is written to a copy is lost.
auto given(const char* name) { return nb::arg(name).noconvert(); }

// -- weights ------------------------------------------------------------------------------------------------------------------

struct BoundWeights : Weights {
  Strided<const std::uint8_t, 3> values_array;
  std::optional<Strided<const std::uint16_t, 3>> scales_array;
  std::optional<Strided<const std::uint8_t, 3>> zeros_array;

  // Expert (or tile) `place` lies in row `slot` of the arrays from now on; nowhere if that is negative.
  void put(std::int64_t place, std::int64_t slot) {
    check(place >= 0 && place < static_cast<std::int64_t>(places->values.size()), "there is no such expert");
    check(slot < static_cast<std::int64_t>(values_array.shape(0)), "there is no such slot");
    const auto row = [slot](const auto& array) { return slot < 0 ? nullptr : array.data() + slot * array.stride(0); };
    places->values[place] = row(values_array);
    places->scales[place] = scales_array ? row(*scales_array) : nullptr;
    places->zeros[place] = zeros_array ? row(*zeros_array) : nullptr;
  }
};

template <class A>
void check_rows(const A& array, const char* name, std::int64_t rows, std::int64_t width) {
  check(static_cast<std::int64_t>(array.shape(1)) == rows && static_cast<std::int64_t>(array.shape(2)) == width &&
            array.stride(2) == 1 && array.stride(1) == width && array.stride(0) >= 0,
        std::string(name) + " are not contiguous matrices of the shape " + text_of<2>({rows, width}));
}

void make_weights(BoundWeights* self, Strided<const std::uint8_t, 3> values, std::optional<Strided<const std::uint16_t, 3>> scales,
                  std::optional<Strided<const std::uint8_t, 3>> zeros, Maybe<const std::int64_t, 1> slots, std::int64_t channels,
                  std::int64_t outputs, int bits, std::int64_t group, bool tiled) {
  new (self) BoundWeights;
  const std::int64_t row = static_cast<std::int64_t>(values.shape(2)), padded = row * 8 / bits;
  const std::int64_t rows = static_cast<std::int64_t>(values.shape(0)), tiles = tiled ? rows : 1;
  check(bits == 4 || bits == 8 || bits == 16, "weights have 4, 8 or 16 bits");
  check(rows > 0 && channels > 0 && channels % 4 == 0 && padded % 32 == 0 && outputs > 0 && outputs <= padded * tiles,
        std::to_string(outputs) + " outputs in rows of " + std::to_string(padded) + ", " + std::to_string(channels) + " channels");
  check(bits == 16 || (group > 0 && group % 4 == 0 && channels % group == 0 && scales), "groups do not divide the channels");
  check_rows(values, "values", channels, row);
  for (const auto& array : {scales})
    if (array) check_rows(*array, "scales", channels / group, padded);
  if (zeros) check_rows(*zeros, "zeros", channels / group, padded);
  check((!scales || scales->shape(0) == values.shape(0)) && (!zeros || zeros->shape(0) == values.shape(0)), "scales for other experts");
  const std::int64_t count = slots ? static_cast<std::int64_t>(slots->shape(0)) : rows;
  self->places = std::make_shared<Places>();
  self->places->values.resize(count);
  self->places->scales.resize(count);
  self->places->zeros.resize(count);
  self->channels = channels;
  self->outputs = outputs;
  self->padded = padded;
  self->bits = bits;
  self->group = group;
  self->tiles = tiles;
  self->values_array = std::move(values);
  self->scales_array = std::move(scales);
  self->zeros_array = std::move(zeros);
  for (std::int64_t place = 0; place < count; ++place) self->put(place, slots ? slots->data()[place] : place);
}

// -- pairs --------------------------------------------------------------------------------------------------------------------

struct BoundPairs : Pairs, Holder {
  std::int64_t last_expert = -1, last_token = -1;

  const Pairs& checked(std::int64_t experts, std::int64_t tokens_given) const {
    check(last_expert < experts, "an expert's id is out of range");
    check(last_token < tokens_given, "a token's id is out of range");
    return *this;
  }
};

void make_pairs(BoundPairs* self, Array<const std::int64_t, 1> experts, Array<const std::int64_t, 1> offsets,
                Array<const std::int64_t, 1> tokens) {
  new (self) BoundPairs;
  const auto count = static_cast<std::int64_t>(experts.shape(0)), pairs = static_cast<std::int64_t>(tokens.shape(0));
  self->loaded = count;
  self->experts = self->hold(experts).data();
  self->offsets = of_shape<const std::int64_t, 1>(self->hold(offsets), "offsets", {count + 1});
  self->tokens = self->hold(tokens).data();
  check(self->offsets[0] == 0 && self->offsets[count] == pairs, "the offsets do not end at the number of pairs");
  for (std::int64_t u = 0; u < count; ++u) {
    check(self->experts[u] >= 0, "an expert's id is out of range");
    check(self->offsets[u] <= self->offsets[u + 1], "the offsets do not ascend");
    self->last_expert = std::max(self->last_expert, self->experts[u]);
  }
  for (std::int64_t p = 0; p < pairs; ++p) {
    check(self->tokens[p] >= 0, "a token's id is out of range");
    self->last_token = std::max(self->last_token, self->tokens[p]);
  }
}

Selection selection_of(const Weights& w, const Pairs& pairs, const Maybe<const bool, 2>& loaded, const Maybe<const bool, 2>& compute) {
  return {of_shape<const bool, 2>(loaded, "loaded", {w.count(), w.channels}),
          of_shape<const bool, 2>(compute, "compute", {pairs.count(), w.channels})};
}

// -- layers -------------------------------------------------------------------------------------------------------------------

struct BoundAttention : AttentionLayer, Holder {};

void make_attention(BoundAttention* self, const BoundWeights& query, const BoundWeights& key, const BoundWeights& value,
                    const BoundWeights& output, Maybe<const float, 1> query_bias, Maybe<const float, 1> key_bias,
                    Maybe<const float, 1> value_bias, Maybe<const float, 1> output_bias, Maybe<const float, 1> norm,
                    Maybe<const float, 1> query_norm, Maybe<const float, 1> key_norm, std::int64_t heads, std::int64_t kv_heads,
                    std::int64_t dim, float eps, float scale, float residual, float clip) {
  new (self) BoundAttention;
  const std::int64_t hidden = query.channels, width = heads * dim, kv_width = kv_heads * dim;
  check(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && dim > 0 && dim % 2 == 0, "the numbers of heads do not fit");
  check(query.outputs == width && key.channels == hidden && key.outputs == kv_width && value.channels == hidden &&
            value.outputs == kv_width && output.channels == width && (!norm || output.outputs == hidden),
        "the matrices of attention do not fit");
  static_cast<Weights&>(self->query) = query;
  static_cast<Weights&>(self->key) = key;
  static_cast<Weights&>(self->value) = value;
  static_cast<Weights&>(self->output) = output;
  self->query_bias = of_shape<const float, 1>(self->hold(query_bias), "query_bias", {width});
  self->key_bias = of_shape<const float, 1>(self->hold(key_bias), "key_bias", {kv_width});
  self->value_bias = of_shape<const float, 1>(self->hold(value_bias), "value_bias", {kv_width});
  self->output_bias = of_shape<const float, 1>(self->hold(output_bias), "output_bias", {output.outputs});
  self->norm = of_shape<const float, 1>(self->hold(norm), "norm", {hidden});
  self->norm_per_head = query_norm && static_cast<std::int64_t>(query_norm->shape(0)) == dim;
  const bool per_head = self->norm_per_head;
  self->query_norm = of_shape<const float, 1>(self->hold(query_norm), "query_norm", {per_head ? dim : width});
  self->key_norm = of_shape<const float, 1>(self->hold(key_norm), "key_norm", {per_head ? dim : kv_width});
  self->heads = heads;
  self->kv_heads = kv_heads;
  self->dim = dim;
  self->eps = eps;
  self->scale = scale;
  self->residual = residual;
  self->clip = clip;
}

struct BoundContext : Context, Holder {
  std::int64_t tokens, layers, kv_heads, dim;

  const Context& checked(const AttentionLayer& layer, std::int64_t tokens_given, std::int64_t layers_given) const {
    check(tokens == tokens_given && layers == layers_given && kv_heads == layer.kv_heads && dim == layer.dim,
          "the context is of another stage or of other layers");
    return *this;
  }
};

void make_context(BoundContext* self, Array<const float, 2> cos, Array<const float, 2> sin, Array<float, 4> keys,
                  Array<float, 4> values, std::int64_t length, Maybe<const bool, 2> mask) {
  new (self) BoundContext;
  const auto tokens = static_cast<std::int64_t>(cos.shape(0)), dim = static_cast<std::int64_t>(cos.shape(1));
  const auto layers = static_cast<std::int64_t>(keys.shape(0)), heads = static_cast<std::int64_t>(keys.shape(1));
  const auto capacity = static_cast<std::int64_t>(keys.shape(2));
  check(length >= 0 && length + tokens <= capacity,
        std::to_string(length) + " + " + std::to_string(tokens) + " tokens in a cache for " + std::to_string(capacity));
  self->cos = self->hold(cos).data();
  self->sin = of_shape<const float, 2>(self->hold(sin), "sin", {tokens, dim});
  self->keys = of_shape<float, 4>(self->hold(keys), "keys", {layers, heads, capacity, dim});
  self->values = of_shape<float, 4>(self->hold(values), "values", {layers, heads, capacity, dim});
  self->capacity = capacity;
  self->length = length;
  self->mask = of_shape<const bool, 2>(self->hold(mask), "mask", {tokens, length + tokens});
  self->tokens = tokens;
  self->layers = layers;
  self->kv_heads = heads;
  self->dim = dim;
}

// A store written in Python: an object with use(layer, experts) and release(layer, experts).
class PythonStore : public ExpertStore {
 public:
  explicit PythonStore(nb::object store) : store_(std::move(store)) {}
  void use(std::int64_t layer, const std::int64_t* experts, std::int64_t count) override {
    const nb::gil_scoped_acquire acquired;
    store_.attr("use")(layer, std::vector<std::int64_t>(experts, experts + count));
  }
  void release(std::int64_t layer, const std::int64_t* experts, std::int64_t count) override {
    const nb::gil_scoped_acquire acquired;
    try {
      store_.attr("release")(layer, std::vector<std::int64_t>(experts, experts + count));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("release of an expert store");
    }
  }

 private:
  nb::object store_;
};

struct BoundExperts : ExpertLayer, Holder {
  std::shared_ptr<PythonStore> own_store;
};

void make_experts(BoundExperts* self, Array<const float, 1> norm, Array<const float, 2> router, const BoundWeights& gate_up,
                  const BoundWeights& down, Maybe<const float, 2> gate_up_bias, Maybe<const float, 2> down_bias, std::int64_t top_k,
                  bool sigmoid, bool normalise, float eps, float router_scale, float residual, Activation activation, bool gated,
                  std::int64_t number, nb::object store) {
  new (self) BoundExperts;
  const std::int64_t hidden = gate_up.channels, count = gate_up.count();
  check(down.count() == count && down.outputs == hidden && gate_up.outputs == (gated ? 2 : 1) * down.channels && top_k > 0 &&
            top_k <= count && gate_up.tiles == 1 && down.tiles == 1,
        "the matrices of the experts do not fit");
  self->norm = of_shape<const float, 1>(self->hold(norm), "norm", {hidden});
  self->router = of_shape<const float, 2>(self->hold(router), "router", {count, hidden});
  self->gate_up_bias = of_shape<const float, 2>(self->hold(gate_up_bias), "gate_up_bias", {count, gate_up.outputs});
  self->down_bias = of_shape<const float, 2>(self->hold(down_bias), "down_bias", {count, down.outputs});
  static_cast<Weights&>(self->gate_up) = gate_up;
  static_cast<Weights&>(self->down) = down;
  self->top_k = top_k;
  self->sigmoid = sigmoid;
  self->normalise = normalise;
  self->eps = eps;
  self->router_scale = router_scale;
  self->residual = residual;
  self->activation = activation;
  self->gated = gated;
  self->number = number;
  if (!store.is_none()) {
    self->own_store = std::make_shared<PythonStore>(store);
    self->store = self->own_store.get();
  }
}

struct BoundRule : StageRule, Holder {
  std::int64_t tokens;

  // Most experts that a token chooses among, and that it takes, by prompt-wise reuse; 0 without it.
  std::int64_t last_candidates() const { return tiers ? std::max(candidates[0], candidates[1]) : 0; }
  std::int64_t last_taken() const { return tiers ? std::max(taken[0], taken[1]) : 0; }
};

void make_rule(BoundRule* self, Array<const std::int64_t, 1> depth, Maybe<const std::int64_t, 1> tiers,
               std::pair<std::int64_t, std::int64_t> minor, std::pair<std::int64_t, std::int64_t> trivial, Maybe<const bool, 1> keep,
               std::optional<double> keep_channels, std::optional<float> selection_ratio, Maybe<const float, 1> token_weight) {
  new (self) BoundRule;
  const std::int64_t tokens = self->tokens = static_cast<std::int64_t>(depth.shape(0));
  self->depth = self->hold(depth).data();
  self->tiers = of_shape<const std::int64_t, 1>(self->hold(tiers), "tiers", {tokens});
  self->keep = of_shape<const bool, 1>(self->hold(keep), "keep", {tokens});
  self->token_weight = of_shape<const float, 1>(self->hold(token_weight), "token_weight", {tokens});
  self->candidates[0] = minor.first;
  self->candidates[1] = trivial.first;
  self->taken[0] = minor.second;
  self->taken[1] = trivial.second;
  self->fine = keep_channels.has_value();
  self->keep_channels = keep_channels.value_or(0);
  self->coalesce = selection_ratio.has_value();
  self->selection_ratio = selection_ratio.value_or(0);
  for (std::int64_t t = 0; self->tiers && t < tokens; ++t) check(self->tiers[t] >= 0 && self->tiers[t] <= 2, "there are three tiers");
}

// Checks that a rule suits a layer, so that no rank and no expert is out of range.
const StageRule* suiting(const BoundRule* rule, const ExpertLayer& layer, std::int64_t tokens) {
  if (!rule) return nullptr;
  check(rule->tokens == tokens, "the rule is of another stage");
  for (int tier = 0; rule->tiers && tier < 2; ++tier)
    check(rule->taken[tier] >= 1 && rule->taken[tier] <= layer.top_k && rule->taken[tier] <= rule->candidates[tier] &&
              rule->candidates[tier] <= rule->candidates[1] && rule->candidates[1] <= layer.gate_up.count(),
          "the rule takes more experts than there are");
  return rule;
}

struct BoundDecision : Holder {
  Array<std::int64_t, 3> experts;
  Array<float, 3> weights;
  Maybe<bool, 3> gate_up, down, gate_up_compute, down_compute;
  Array<std::int64_t, 2> read;
};

struct BoundObservation {
  Array<float, 3> logits, inputs, down_inputs;
};

// The arrays of a choice in `layers` layers, checked against their sizes.
struct Choosing {
  Choice choice{};
  Observation observation{};

  Choosing(const ExpertLayer& layer, std::int64_t layers, std::int64_t tokens, const Array<std::int64_t, 3>& experts,
           const Array<float, 3>& weights, const BoundRule* rule, const BoundDecision* decision, const BoundObservation* observed) {
    const std::int64_t k = layer.top_k, count = layer.gate_up.count(), hidden = layer.gate_up.channels, width = layer.down.channels;
    choice.experts = of_shape<std::int64_t, 3>(experts, "experts", {layers, tokens, k});
    choice.weights = of_shape<float, 3>(weights, "weights", {layers, tokens, k});
    choice.rule = suiting(rule, layer, tokens);
    if (rule) {
      check(decision, "a rule needs a decision to fill in");
      choice.decision = {of_shape<std::int64_t, 3>(decision->experts, "decision.experts", {layers, tokens, k}),
                         of_shape<float, 3>(decision->weights, "decision.weights", {layers, tokens, k}),
                         of_shape<bool, 3>(decision->gate_up, "decision.gate_up", {layers, count, hidden}),
                         of_shape<bool, 3>(decision->down, "decision.down", {layers, count, width}),
                         of_shape<bool, 3>(decision->gate_up_compute, "decision.gate_up_compute", {layers, tokens * k, hidden}),
                         of_shape<bool, 3>(decision->down_compute, "decision.down_compute", {layers, tokens * k, width}),
                         of_shape<std::int64_t, 2>(decision->read, "decision.read", {layers, 4})};
      check(!rule->fine || (choice.decision.gate_up && choice.decision.down), "fine pruning needs room for the channels");
    }
    if (observed) {
      observation = {of_shape<float, 3>(observed->logits, "observation.logits", {layers, tokens, count}),
                     of_shape<float, 3>(observed->inputs, "observation.inputs", {layers, tokens, hidden}),
                     of_shape<float, 3>(observed->down_inputs, "observation.down_inputs", {layers, tokens * k, width})};
      choice.observed = &observation;
    }
  }
};

struct BoundDraft : DraftLayer, Holder {};

struct BoundStack : LayerStack {};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Matrix products with packed channel-major weights, and what stands around them; see csrc/*.h.";

  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("relu", Activation::relu)
      .value("identity", Activation::identity);

  m.def("isa", [] { return std::string(isa().name); });
  m.def("has_isa", [](const std::string& name) { return has_isa(name.c_str()); });
  m.def("select_isa", [](const std::string& name) { return select_isa(name.c_str()); });
  m.def("set_threads", &set_threads, Release());
  m.def("threads", &threads, Release());

  nb::class_<BoundWeights>(m, "Weights")
      .def("__init__", &make_weights, nb::kw_only(), given("values"), given("scales").none(), given("zeros").none(),
           given("slots").none(), nb::arg("channels"), nb::arg("outputs"), nb::arg("bits"), nb::arg("group"), nb::arg("tiled"))
      .def("put", &BoundWeights::put, given("expert"), nb::arg("slot"));

  nb::class_<BoundPairs>(m, "Pairs")
      .def("__init__", &make_pairs, nb::kw_only(), given("experts"), given("offsets"), given("tokens"));

  nb::class_<BoundAttention>(m, "AttentionLayer")
      .def("__init__", &make_attention, nb::kw_only(), given("query"), given("key"), given("value"), nb::arg("output"),
           given("query_bias").none(), given("key_bias").none(), given("value_bias").none(), given("output_bias").none(),
           given("norm").none(), given("query_norm").none(), given("key_norm").none(), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("dim"), nb::arg("eps"), nb::arg("scale"), nb::arg("residual"), nb::arg("clip"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "run",
          [](const BoundAttention& layer, Array<const float, 2> x, const BoundContext& context, Array<float, 2> out) {
            const auto tokens = static_cast<std::int64_t>(x.shape(0)), hidden = layer.query.channels;
            check(layer.norm, "this layer is a draft's and has no norm");
            attention_layer(layer, of_shape<const float, 2>(x, "x", {tokens, hidden}), tokens, context.checked(layer, tokens, 1),
                            of_shape<float, 2>(out, "out", {tokens, hidden}));
          },
          nb::kw_only(), given("x"), nb::arg("context"), given("out"), Release());

  nb::class_<BoundContext>(m, "Context")
      .def("__init__", &make_context, nb::kw_only(), given("cos"), given("sin"), given("keys"), given("values"),
           nb::arg("length"), given("mask").none());

  nb::class_<BoundRule>(m, "StageRule")
      .def("__init__", &make_rule, nb::kw_only(), given("depth"), given("tiers").none(), nb::arg("minor"), nb::arg("trivial"),
           given("keep").none(), nb::arg("keep_channels").none(), nb::arg("selection_ratio").none(), given("token_weight").none());

  nb::class_<BoundDecision>(m, "Decision")
      .def(
          "__init__",
          [](BoundDecision* self, Array<std::int64_t, 3> experts, Array<float, 3> weights, Maybe<bool, 3> gate_up, Maybe<bool, 3> down,
             Maybe<bool, 3> gate_up_compute, Maybe<bool, 3> down_compute, Array<std::int64_t, 2> read) {
            new (self) BoundDecision{{}, experts, weights, gate_up, down, gate_up_compute, down_compute, read};
          },
          nb::kw_only(), given("experts"), given("weights"), given("gate_up").none(), given("down").none(),
          given("gate_up_compute").none(), given("down_compute").none(), given("read"));

  nb::class_<BoundObservation>(m, "Observation")
      .def(
          "__init__",
          [](BoundObservation* self, Array<float, 3> logits, Array<float, 3> inputs, Array<float, 3> down_inputs) {
            new (self) BoundObservation{logits, inputs, down_inputs};
          },
          nb::kw_only(), given("logits"), given("inputs"), given("down_inputs"));

  nb::class_<BoundExperts>(m, "ExpertLayer")
      .def("__init__", &make_experts, nb::kw_only(), given("norm"), given("router"), given("gate_up"), given("down"),
           given("gate_up_bias").none(), given("down_bias").none(), nb::arg("top_k"), nb::arg("sigmoid"), nb::arg("normalise"),
           nb::arg("eps"), nb::arg("router_scale"), nb::arg("residual"), nb::arg("activation"), nb::arg("gated"), nb::arg("number"),
           nb::arg("store").none(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "run",
          [](const BoundExperts& layer, Array<const float, 2> x, Array<std::int64_t, 3> experts, Array<float, 3> weights,
             const BoundRule* rule, const BoundDecision* decision, const BoundObservation* observation, Array<float, 2> out) {
            const auto tokens = static_cast<std::int64_t>(x.shape(0)), hidden = layer.gate_up.channels;
            const Choosing choosing(layer, 1, tokens, experts, weights, rule, decision, observation);
            return expert_layer(layer, of_shape<const float, 2>(x, "x", {tokens, hidden}), tokens, choosing.choice,
                                of_shape<float, 2>(out, "out", {tokens, hidden}));
          },
          nb::kw_only(), given("x"), given("experts"), given("weights"), nb::arg("rule").none(), nb::arg("decision").none(),
          nb::arg("observation").none(), given("out"), Release());

  nb::class_<BoundStack>(m, "LayerStack")
      .def(nb::init<>())
      .def(
          "add",
          [](BoundStack& stack, const BoundAttention& attention, const BoundExperts& experts) {
            if (!stack.layers.empty()) {
              const auto& [first, other] = stack.layers.front();
              check(first->query.channels == attention.query.channels && first->kv_heads == attention.kv_heads &&
                        first->dim == attention.dim && other->top_k == experts.top_k &&
                        other->gate_up.count() == experts.gate_up.count() && other->down.channels == experts.down.channels,
                    "the layers of a stack are of the same sizes");
            }
            check(attention.norm && attention.query.channels == experts.gate_up.channels, "the halves of the layer do not fit");
            stack.layers.push_back({&attention, &experts});
          },
          nb::arg("attention"), given("experts"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "run",
          [](const BoundStack& stack, Array<const float, 2> x, const BoundContext& context, const std::vector<std::int64_t>& fused,
             Array<float, 2> features, Array<std::int64_t, 3> experts, Array<float, 3> weights, const BoundRule* rule,
             const BoundDecision* decision, const BoundObservation* observation, Array<float, 2> out) {
            const auto& [attention, moe] = stack.layers.at(0);
            const auto tokens = static_cast<std::int64_t>(x.shape(0)), layers = static_cast<std::int64_t>(stack.layers.size());
            const std::int64_t hidden = attention->query.channels, wanted = static_cast<std::int64_t>(fused.size());
            const Choosing choosing(*moe, layers, tokens, experts, weights, rule, decision, observation);
            return layer_stack(stack, of_shape<const float, 2>(x, "x", {tokens, hidden}), tokens,
                               context.checked(*attention, tokens, layers), fused,
                               of_shape<float, 2>(features, "features", {tokens, wanted * hidden}), choosing.choice,
                               of_shape<float, 2>(out, "out", {tokens, hidden}));
          },
          nb::kw_only(), given("x"), nb::arg("context"), nb::arg("fused"), given("features"), given("experts"),
          given("weights"), nb::arg("rule").none(), nb::arg("decision").none(), nb::arg("observation").none(), given("out"),
          Release());

  nb::class_<BoundDraft>(m, "DraftLayer")
      .def(
          "__init__",
          [](BoundDraft* self, const BoundAttention& attention, const BoundWeights& gate, const BoundWeights& up,
             const BoundWeights& down, Array<const float, 1> embedding_norm, Array<const float, 1> state_norm,
             Array<const float, 1> mlp_norm, bool norm_before_residual, float eps) {
            new (self) BoundDraft;
            const std::int64_t hidden = gate.channels;
            check(attention.query.channels == 2 * hidden && attention.output.outputs == hidden && up.channels == hidden &&
                      up.outputs == gate.outputs && down.channels == gate.outputs && down.outputs == hidden,
                  "the matrices of the draft's layer do not fit");
            self->attention = attention;
            self->gate = gate;
            self->up = up;
            self->down = down;
            self->embedding_norm = of_shape<const float, 1>(self->hold(embedding_norm), "embedding_norm", {hidden});
            self->state_norm = of_shape<const float, 1>(self->hold(state_norm), "state_norm", {hidden});
            self->mlp_norm = of_shape<const float, 1>(self->hold(mlp_norm), "mlp_norm", {hidden});
            self->norm_before_residual = norm_before_residual;
            self->eps = eps;
          },
          nb::kw_only(), nb::arg("attention"), nb::arg("gate"), nb::arg("up"), given("down"), given("embedding_norm"),
          given("state_norm"), given("mlp_norm"), nb::arg("norm_before_residual"), nb::arg("eps"), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "run",
          [](const BoundDraft& layer, Array<const float, 2> embeddings, Array<const float, 2> states, const BoundContext& context,
             Array<float, 2> out) {
            const auto tokens = static_cast<std::int64_t>(states.shape(0)), hidden = layer.gate.channels;
            draft_layer(layer, of_shape<const float, 2>(embeddings, "embeddings", {tokens, hidden}),
                        of_shape<const float, 2>(states, "states", {tokens, hidden}), tokens,
                        context.checked(layer.attention, tokens, 1), of_shape<float, 2>(out, "out", {tokens, hidden}));
          },
          nb::kw_only(), given("embeddings"), given("states"), nb::arg("context"), given("out"), Release());

  m.def(
      "top_log_probs",
      [](Array<const float, 2> logits, Array<std::int64_t, 2> ids, Array<float, 2> log_probs) {
        const auto rows = static_cast<std::int64_t>(logits.shape(0)), n = static_cast<std::int64_t>(logits.shape(1));
        const auto k = static_cast<std::int64_t>(ids.shape(1));
        check(k >= 1 && k <= n, "more tokens are wanted than there are");
        top_log_probs(logits.data(), rows, n, k, of_shape<std::int64_t, 2>(ids, "ids", {rows, k}),
                      of_shape<float, 2>(log_probs, "log_probs", {rows, k}));
      },
      given("logits"), given("ids"), given("log_probs"), Release());

  m.def(
      "group",
      [](Array<const std::int64_t, 1> expert, Array<const std::int64_t, 1> token, Array<std::int64_t, 1> experts,
         Array<std::int64_t, 1> offsets, Array<std::int64_t, 1> tokens, Array<std::int64_t, 1> order) {
        const auto pairs = static_cast<std::int64_t>(expert.shape(0)), count = static_cast<std::int64_t>(experts.shape(0));
        for (std::int64_t i = 0; i < pairs; ++i)
          check(expert.data()[i] >= 0 && expert.data()[i] < count, "an expert's id is out of range");
        return group(expert.data(), of_shape<const std::int64_t, 1>(token, "token", {pairs}), pairs, count, experts.data(),
                     of_shape<std::int64_t, 1>(offsets, "offsets", {count + 1}), of_shape<std::int64_t, 1>(tokens, "tokens", {pairs}),
                     of_shape<std::int64_t, 1>(order, "order", {pairs}));
      },
      nb::kw_only(), given("expert"), given("token"), given("experts"), given("offsets"), given("tokens"), given("order"));

  m.def(
      "linear",
      [](const BoundWeights& w, Array<const float, 2> x, Maybe<const float, 1> bias, Array<float, 2> out) {
        const auto rows = static_cast<std::int64_t>(x.shape(0));
        check(w.count() == 1, "these are the weights of experts");
        linear({{w, of_shape<const float, 1>(bias, "bias", {w.outputs}), of_shape<float, 2>(out, "out", {rows, w.outputs})}},
               of_shape<const float, 2>(x, "x", {rows, w.channels}), rows);
      },
      given("weights"), given("x"), given("bias").none(), given("out"), Release());
  m.def(
      "gate_up",
      [](const BoundWeights& w, Array<const float, 2> x, const BoundPairs& pairs, Maybe<const bool, 2> loaded,
         Maybe<const bool, 2> compute, Maybe<const float, 2> bias, Activation activation, bool gated, Array<float, 2> out) {
        const auto tokens = static_cast<std::int64_t>(x.shape(0)), width = gated ? w.outputs / 2 : w.outputs;
        check(w.tiles == 1, "experts lie in no tiles");
        gate_up(w, of_shape<const float, 2>(x, "x", {tokens, w.channels}), tokens, pairs.checked(w.count(), tokens),
                selection_of(w, pairs, loaded, compute), of_shape<const float, 2>(bias, "bias", {w.count(), w.outputs}), activation,
                gated, of_shape<float, 2>(out, "out", {pairs.count(), width}));
      },
      nb::kw_only(), given("weights"), given("x"), nb::arg("pairs"), given("loaded").none(), given("compute").none(),
      given("bias").none(), nb::arg("activation"), nb::arg("gated"), given("out"), Release());
  m.def(
      "down",
      [](const BoundWeights& w, Array<const float, 2> x, const BoundPairs& pairs, Maybe<const bool, 2> loaded,
         Maybe<const bool, 2> compute, Maybe<const float, 2> bias, Array<const float, 1> weights, Array<float, 2> out) {
        const auto tokens = static_cast<std::int64_t>(out.shape(0));
        check(w.tiles == 1, "experts lie in no tiles");
        down(w, of_shape<const float, 2>(x, "x", {pairs.count(), w.channels}), tokens, pairs.checked(w.count(), tokens),
             selection_of(w, pairs, loaded, compute), of_shape<const float, 2>(bias, "bias", {w.count(), w.outputs}),
             of_shape<const float, 1>(weights, "weights", {pairs.count()}), of_shape<float, 2>(out, "out", {tokens, w.outputs}));
      },
      nb::kw_only(), given("weights"), given("x"), nb::arg("pairs"), given("loaded").none(), given("compute").none(),
      given("bias").none(), given("pair_weights"), given("out"), Release());

  m.def(
      "rms_norm",
      [](Array<const float, 2> x, Array<const float, 1> weight, float eps, Array<float, 2> out) {
        const auto rows = static_cast<std::int64_t>(x.shape(0)), n = static_cast<std::int64_t>(x.shape(1));
        rms_norm(x.data(), of_shape<const float, 1>(weight, "weight", {n}), of_shape<float, 2>(out, "out", {rows, n}), rows, n, eps);
      },
      given("x"), given("weight"), nb::arg("eps"), given("out"), Release());
  m.def(
      "float_linear",
      [](Array<const float, 2> x, Array<const float, 2> weight, Array<float, 2> out) {
        const auto rows = static_cast<std::int64_t>(x.shape(0)), n = static_cast<std::int64_t>(x.shape(1));
        const auto outputs = static_cast<std::int64_t>(weight.shape(0));
        float_linear(x.data(), of_shape<const float, 2>(weight, "weight", {outputs, n}),
                     of_shape<float, 2>(out, "out", {rows, outputs}), rows, n, outputs);
      },
      given("x"), given("weight"), given("out"), Release());
  m.def(
      "attention",
      [](Strided<const float, 3> query, Strided<const float, 3> key, Strided<const float, 3> value, Maybe<const bool, 2> mask,
         float scale, Array<float, 3> out) {
        const auto heads = static_cast<std::int64_t>(query.shape(0)), tokens = static_cast<std::int64_t>(query.shape(1));
        const auto dim = static_cast<std::int64_t>(query.shape(2)), kv_heads = static_cast<std::int64_t>(key.shape(0));
        const auto keys = static_cast<std::int64_t>(key.shape(1)), value_dim = static_cast<std::int64_t>(value.shape(2));
        check(kv_heads > 0 && heads % kv_heads == 0 && static_cast<std::int64_t>(key.shape(2)) == dim && value.shape(0) == key.shape(0) &&
                  value.shape(1) == key.shape(1) && tokens <= keys && query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1,
              "queries, keys and values do not fit");
        attention({query.data(), key.data(), value.data(), query.stride(0), query.stride(1), key.stride(0), key.stride(1),
                   value.stride(0), value.stride(1), of_shape<const bool, 2>(mask, "mask", {tokens, keys}),
                   of_shape<float, 3>(out, "out", {tokens, heads, value_dim}), heads, kv_heads, tokens, keys, dim, value_dim, scale});
      },
      nb::kw_only(), given("query"), given("key"), given("value"), given("mask").none(), nb::arg("scale"), given("out"),
      Release());
  m.def(
      "needed_channels",
      [](Array<const float, 2> activations, Array<const float, 1> weights, Array<const std::int64_t, 1> offsets, double share,
         Array<bool, 2> mask) {
        const auto pairs = static_cast<std::int64_t>(activations.shape(0)), channels = static_cast<std::int64_t>(activations.shape(1));
        const auto tokens = static_cast<std::int64_t>(offsets.shape(0)) - 1;
        check(tokens >= 0 && offsets.data()[0] == 0 && offsets.data()[tokens] == pairs, "the offsets do not end at the number of pairs");
        for (std::int64_t t = 0; t < tokens; ++t) check(offsets.data()[t] <= offsets.data()[t + 1], "the offsets do not ascend");
        needed_channels(activations.data(), nullptr, of_shape<const float, 1>(weights, "weights", {pairs}), offsets.data(), tokens,
                        channels, share, of_shape<bool, 2>(mask, "mask", {pairs, channels}));
      },
      nb::kw_only(), given("activations"), given("weights"), given("offsets"), nb::arg("share"), given("mask"), Release());
  m.def(
      "choose_experts",
      [](const BoundRule& rule, Array<const float, 2> choice, Array<const float, 2> gate, bool normalise, float scale,
         Array<std::int64_t, 2> experts, Array<float, 2> weights) {
        const auto tokens = static_cast<std::int64_t>(choice.shape(0)), count = static_cast<std::int64_t>(choice.shape(1));
        const auto k = static_cast<std::int64_t>(experts.shape(1));
        check(k >= 1 && k <= count && rule.last_candidates() <= count && rule.last_taken() <= k, "the rule takes more experts than there are");
        check(rule.tokens == tokens, "the rule is of another stage");
        of_shape<std::int64_t, 2>(experts, "experts", {tokens, k});
        for (std::int64_t i = 0; i < tokens * k; ++i)
          check(experts.data()[i] >= 0 && experts.data()[i] <= count, "an expert's id is out of range");
        choose_experts(rule, choice.data(), of_shape<const float, 2>(gate, "gate", {tokens, count}), normalise, scale, tokens, k, count,
                       experts.data(), of_shape<float, 2>(weights, "weights", {tokens, k}));
      },
      nb::kw_only(), nb::arg("rule"), given("choice"), given("gate"), nb::arg("normalise"), nb::arg("scale"), given("experts"),
      given("weights"), Release());
  m.def(
      "salient_channels",
      [](Array<const float, 2> scores, Array<const bool, 2> mask, Array<const std::int64_t, 1> pair_expert,
         Array<const std::int64_t, 1> pair_depth, float selection_ratio, Array<bool, 2> loaded) {
        const auto pairs = static_cast<std::int64_t>(scores.shape(0)), channels = static_cast<std::int64_t>(scores.shape(1));
        const auto experts = static_cast<std::int64_t>(loaded.shape(0));
        of_shape<const std::int64_t, 1>(pair_expert, "pair_expert", {pairs});
        for (std::int64_t p = 0; p < pairs; ++p)
          check(pair_expert.data()[p] >= 0 && pair_expert.data()[p] < experts, "an expert's id is out of range");
        salient_channels(scores.data(), nullptr, nullptr, of_shape<const bool, 2>(mask, "mask", {pairs, channels}), pair_expert.data(),
                         of_shape<const std::int64_t, 1>(pair_depth, "pair_depth", {pairs}), pairs, channels, selection_ratio, experts,
                         of_shape<bool, 2>(loaded, "loaded", {experts, channels}));
      },
      nb::kw_only(), given("scores"), given("mask"), given("pair_expert"), given("pair_depth"), nb::arg("selection_ratio"),
      given("loaded"), Release());

  // For tests: the expert weight bytes that products touch while it is on, and tasks that fail or begin tasks of their own.
  m.def("count_bytes", &count_bytes, nb::arg("on"));
  m.def("bytes_counted", &bytes_counted);
  m.def(
      "run_failing_tasks",
      [](std::int64_t tasks, std::int64_t failing) {
        parallel_for(tasks, [&](std::int64_t task, int) {
          if (task == failing) throw std::runtime_error("task " + std::to_string(task) + " failed");
        });
      },
      Release());
  m.def(
      "run_nested_tasks",
      [](std::int64_t outer, std::int64_t inner) {
        std::atomic<std::int64_t> done{0};
        parallel_for(outer, [&](std::int64_t, int thread) {
          parallel_for(inner, [&](std::int64_t, int own) { done += own == thread; });
        });
        return done.load();
      },
      Release());

  // Yardsticks of benchmarks/native_kernels.py.
  m.def(
      "read_memory",
      [](Array<const std::uint8_t, 1> bytes) {
        const auto n = static_cast<std::int64_t>(bytes.shape(0));
        const std::int64_t part = (n / (8 * threads()) + 255) / 256 * 256;
        parallel_for((n + part - 1) / part, [&](std::int64_t i, int) {
          const std::int64_t length = i * part + part < n ? part : (n - i * part) / 256 * 256;
          volatile std::uint64_t keep = isa().read(bytes.data() + i * part, length);
          (void)keep;
        });
      },
      given("bytes"), Release());
  m.def(
      "multiply_in_registers",
      [](std::int64_t rounds) {
        std::atomic<std::int64_t> done{0};
        parallel_for(8 * threads(), [&](std::int64_t, int) { done += isa().peak(rounds); });
        return done.load();
      },
      nb::arg("rounds"), Release());
}
