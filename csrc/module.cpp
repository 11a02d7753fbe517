// The Python face of the kernels: weights, the K/V store, the operations of a backend, and a decoder's forward pass.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <optional>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "drafting.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <typename T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// Linux hands out the tile registers of AMX only to a process that asks.
bool may_use_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    if (may_use_amx()) found.push_back(amx_kernels());
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(avx512bf16_kernels());
    found.push_back(avx512_kernels());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(avx2_kernels());
#endif
  found.push_back(portable_kernels());
  return found;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

std::vector<float> copy(const nb::object& array) {
  if (array.is_none()) return {};
  Array<const float, 1> values;
  require(nb::try_cast(array, values), "a vector of float32 is needed");
  return {values.data(), values.data() + values.shape(0)};
}

// One engine's threads and kernels, with the operations of paceline.backends.base.Backend.
class Runtime {
 public:
  Runtime(int num_threads, const std::string& instruction_set) : threads_(num_threads) {
    for (const Kernels* kernels : usable_kernels())
      if (instruction_set == kernels->name) kernels_ = kernels;
    require(kernels_ != nullptr, "this processor does not have that instruction set");
  }

  const Kernels& kernels() const { return *kernels_; }
  Threads& threads() { return threads_; }

  std::shared_ptr<const Weight> pack_quantised(int bits, Array<const uint8_t, 2> codes, Array<const float, 2> scales,
                                               Array<const float, 2> minima) {
    require(bits == 4 || bits == 8, "bits must be 4 or 8");
    const size_t num_groups = (codes.shape(1) + kGroup - 1) / kGroup;
    require(scales.shape(0) == codes.shape(0) && scales.shape(1) == num_groups && minima.shape(0) == codes.shape(0) &&
                minima.shape(1) == num_groups,
            "scales and minima must be [outputs, groups of 32 inputs]");
    const nb::gil_scoped_release release;
    return std::make_shared<const Weight>(Weight::quantised(weights_, bits, static_cast<int>(codes.shape(0)),
                                                            static_cast<int>(codes.shape(1)), codes.data(),
                                                            scales.data(), minima.data()));
  }

  std::shared_ptr<const Weight> pack_bf16(Array<const float, 2> values) {
    const nb::gil_scoped_release release;
    return std::make_shared<const Weight>(
        Weight::bf16(weights_, static_cast<int>(values.shape(0)), static_cast<int>(values.shape(1)), values.data()));
  }

  void linear(const Weight& weight, const nb::object& bias, Array<const float, 2> x, Array<float, 2> out) {
    const Panels& panels = weight.panels();
    const int num_rows = static_cast<int>(x.shape(0));
    require(static_cast<int>(x.shape(1)) == panels.num_inputs, "x and weight differ in width");
    require(static_cast<int>(out.shape(1)) == panels.num_outputs && out.shape(0) == x.shape(0), "out has another shape");
    const std::vector<float> biases = copy(bias);
    require(biases.empty() || static_cast<int>(biases.size()) == panels.num_outputs, "bias has another length");
    const nb::gil_scoped_release release;
    multiply(*kernels_, threads_, weight, biases.empty() ? nullptr : biases.data(), x.data(), num_rows, out.data());
  }

  void embedding(const Weight& table, Array<const int64_t, 1> token_ids, Array<float, 2> out) {
    const Panels& panels = table.panels();
    require(out.shape(0) == token_ids.shape(0) && static_cast<int>(out.shape(1)) == panels.num_inputs,
            "out has another shape");
    for (size_t i = 0; i < token_ids.shape(0); ++i) {
      require(token_ids.data()[i] >= 0 && token_ids.data()[i] < panels.num_outputs, "a token id is out of range");
      kernels_->unpack_row(panels, static_cast<int>(token_ids.data()[i]), out.data() + i * out.shape(1));
    }
  }

  void rms_norm(Array<const float, 2> x, Array<const float, 1> weight, float eps, Array<float, 2> out) {
    const int n = static_cast<int>(x.shape(1));
    require(weight.shape(0) == x.shape(1), "x and weight differ in width");
    require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "out has another shape");
    for (size_t row = 0; row < x.shape(0); ++row)
      kernels_->rms_norm(x.data() + row * n, weight.data(), n, eps, out.data() + row * n);
  }

  void rope(Array<float, 3> x, Array<const float, 2> cos, Array<const float, 2> sin) {
    const int head_dim = static_cast<int>(x.shape(2));
    require(cos.shape(0) == x.shape(0) && cos.shape(1) == x.shape(2) && sin.shape(0) == x.shape(0) &&
                sin.shape(1) == x.shape(2),
            "cos and sin must be [tokens, head size]");
    for (size_t token = 0; token < x.shape(0); ++token)
      for (size_t head = 0; head < x.shape(1); ++head)
        kernels_->rope(x.data() + (token * x.shape(1) + head) * head_dim, cos.data() + token * head_dim,
                       sin.data() + token * head_dim, head_dim);
  }

  void silu_gate(Array<const float, 2> gate_up, Array<float, 2> out) {
    const int inner = static_cast<int>(out.shape(1));
    require(gate_up.shape(0) == out.shape(0) && gate_up.shape(1) == 2 * out.shape(1), "gate_up must be twice as wide as out");
    for (size_t row = 0; row < out.shape(0); ++row)
      kernels_->silu_gate(gate_up.data() + row * 2 * inner, gate_up.data() + row * 2 * inner + inner, inner,
                          out.data() + row * inner);
  }

  void write_kv(KVStore& store, int layer, Array<const int64_t, 1> slots, Array<const float, 3> k,
                Array<const float, 3> v) {
    require(store.has(layer), "there is no such layer");
    const KV kv = store.layer(layer);
    for (const auto& x : {k, v})
      require(x.shape(0) == slots.shape(0) && static_cast<int>(x.shape(1)) == kv.num_heads &&
                  static_cast<int>(x.shape(2)) == kv.head_dim,
              "k and v must be [slots, heads, head size]");
    for (size_t i = 0; i < slots.shape(0); ++i)
      require(slots.data()[i] >= 0 && slots.data()[i] < store.num_slots(), "a slot is out of range");
    for (size_t i = 0; i < slots.shape(0); ++i)
      for (int head = 0; head < kv.num_heads; ++head) {
        const int64_t offset = (static_cast<int64_t>(i) * kv.num_heads + head) * kv.head_dim;
        kernels_->write_key(kv, slots.data()[i], head, k.data() + offset);
        kernels_->write_value(kv, slots.data()[i], head, v.data() + offset);
      }
  }

  void attention(KVStore& store, int layer, Array<const int32_t, 2> sequences, Array<const int32_t, 2> block_tables,
                 int block_size, int window, Array<const float, 3> q, Array<float, 2> out) {
    require(store.has(layer), "there is no such layer");
    const Batch batch =
        make_batch(static_cast<int>(q.shape(0)), nullptr, nullptr, sequences, block_tables, block_size, store);
    const int num_heads = static_cast<int>(q.shape(1));
    require(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) * q.shape(2), "out has another shape");
    require_heads(num_heads, static_cast<int>(q.shape(2)), store.layer(layer));
    const KV kv = store.layer(layer);
    AttentionPlan plan(batch, num_heads, kv);
    Stage attending, merging;
    const nb::gil_scoped_release release;
    threads_.run([&](int thread) {
      const int64_t width = static_cast<int64_t>(num_heads) * kv.head_dim;
      plan.attend(*kernels_, attending, thread, kv, q.data(), width, window);
      share_ranges(merging, batch.num_tokens, threads_.count(), thread, [&](int first, int last) {
        for (int row = first; row < last; ++row)
          plan.merge_row(*kernels_, row, 0, num_heads, out.data() + row * width);
      });
    });
  }

  void forward(Decoder& decoder, KVStore& store, Array<const int64_t, 1> token_ids, Array<const int64_t, 1> positions,
               Array<const int64_t, 1> slots, Array<const int32_t, 2> sequences,
               Array<const int32_t, 2> block_tables, int block_size,
               const std::optional<Array<const float, 2>>& states, Array<float, 2> hidden, bool kv_only) {
    const Batch batch = make_batch(static_cast<int>(token_ids.shape(0)), positions.data(), slots.data(), sequences,
                                   block_tables, block_size, store);
    require(positions.shape(0) == token_ids.shape(0) && slots.shape(0) == token_ids.shape(0) &&
                hidden.shape(0) == token_ids.shape(0),
            "token_ids, positions, slots and hidden differ in length");
    for (size_t i = 0; i < slots.shape(0); ++i)
      require(slots.data()[i] >= 0 && slots.data()[i] < store.num_slots(), "a slot is out of range");
    decoder.check(token_ids.data(), batch, static_cast<int>(hidden.shape(1)), store);
    require(states.has_value() == (decoder.state_size() != 0) &&
                (!states || (states->shape(0) == token_ids.shape(0) &&
                             static_cast<int>(states->shape(1)) == decoder.state_size())),
            "states must be [tokens, state size], for a decoder with a state size");
    const nb::gil_scoped_release release;
    decoder.forward(*kernels_, threads_, store, token_ids.data(), states ? states->data() : nullptr, batch, hidden.data(),
                    kv_only);
  }

  std::vector<int64_t> draft(Decoder& decoder, const Weight& head, KVStore& store, Array<int16_t, 2> states,
                             std::vector<int64_t> token_ids, int64_t start, const std::vector<int32_t>& block_ids,
                             int block_size, Array<const int64_t, 1> listed, int max_tokens, const nb::object& rule) {
    require(static_cast<int>(states.shape(1)) == decoder.state_size(), "the states have another width");
    DraftRule ends;
    if (!rule.is_none()) {  // asked in between, while the lock is released for the rest
      ends.keeps = [&](double confidence) {
        const nb::gil_scoped_acquire acquire;
        return nb::cast<bool>(rule.attr("keeps")(confidence));
      };
      ends.wants_more = [&] {
        const nb::gil_scoped_acquire acquire;
        return nb::cast<bool>(rule.attr("wants_more")());
      };
    }
    const DraftHead draft_head{decoder, head, {listed.data(), listed.data() + listed.shape(0)}, states.data(),
                               static_cast<int64_t>(states.shape(0))};
    const nb::gil_scoped_release release;
    return draft_greedily(*kernels_, threads_, draft_head, store, std::move(token_ids), start, block_ids, block_size,
                          max_tokens, ends);
  }

  int64_t read_weights(const Decoder& decoder) {
    const nb::gil_scoped_release release;
    return decoder.read_weights(*kernels_, threads_);
  }

 private:
  // sequences: rows of (query_start, query_len, kv_len); block_tables [num_sequences, most blocks].
  static Batch make_batch(int num_tokens, const int64_t* positions, const int64_t* slots,
                          const Array<const int32_t, 2>& sequences, const Array<const int32_t, 2>& block_tables,
                          int block_size, const KVStore& store) {
    require(block_size > 0 && sequences.shape(1) == 3 && block_tables.shape(0) == sequences.shape(0),
            "sequences must be [sequences, 3] and have a block table each");
    Batch batch{num_tokens, positions, slots, {}, block_size};
    for (size_t s = 0; s < sequences.shape(0); ++s) {
      const int32_t* row = sequences.data() + 3 * s;
      const int32_t* table = block_tables.data() + s * block_tables.shape(1);
      const int num_blocks = (row[2] + block_size - 1) / block_size;
      require(row[0] >= 0 && row[1] > 0 && row[1] <= row[2] && row[0] + row[1] <= num_tokens,
              "a sequence's rows are out of range");
      require(num_blocks <= static_cast<int>(block_tables.shape(1)), "a block table is shorter than its sequence");
      for (int i = 0; i < num_blocks; ++i)
        require(table[i] >= 0 && (table[i] + int64_t{1}) * block_size <= store.num_slots(), "a block is out of range");
      batch.sequences.push_back({row[0], row[1], row[2], table});
    }
    return batch;
  }

  static void require_heads(int num_heads, int head_dim, const KV& kv) {
    require(head_dim == kv.head_dim && head_dim <= kMaxHeadDim, "the head size is not the store's, or above 256");
    require(num_heads % kv.num_heads == 0 && num_heads / kv.num_heads <= kMaxQueries,
            "query heads must be a multiple of the K/V heads, at most 64 for each");
  }

  const Kernels* kernels_ = nullptr;
  Threads threads_;
  WeightMemory weights_;
};

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "Paceline's CPU kernels; see csrc/kernels.h.";
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("MAX_GROUP_HEADS") = kMaxQueries;
  m.def("instruction_sets", &instruction_sets, "Names of the instruction sets this processor has, the best first.");

  nb::class_<Weight>(m, "Weight")
      .def_prop_ro("shape", [](const Weight& weight) {
        return nb::make_tuple(weight.panels().num_outputs, weight.panels().num_inputs);
      });

  nb::class_<KVStore>(m, "KVStore")
      .def(nb::init<int, int64_t, int, int, int>(), "num_layers"_a, "num_slots"_a, "num_heads"_a, "head_dim"_a,
           "bits"_a);

  nb::class_<LinearLayer>(m, "LinearLayer")
      .def("__init__", [](LinearLayer* self, std::shared_ptr<const Weight> weight, const nb::object& bias) {
        new (self) LinearLayer{std::move(weight), copy(bias)};
      }, "weight"_a, "bias"_a.none());

  nb::class_<Layer>(m, "Layer")
      .def("__init__", [](Layer* self, const nb::object& attention_norm, const LinearLayer& qkv,
                          const nb::object& q_norm, const nb::object& k_norm, const LinearLayer& output,
                          const nb::object& mlp_norm, const LinearLayer& gate_up, const LinearLayer& down, int window) {
        new (self) Layer{copy(attention_norm), copy(mlp_norm), copy(q_norm), copy(k_norm), qkv, output, gate_up, down,
                         window};
      }, "attention_norm"_a, "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(), "output"_a, "mlp_norm"_a, "gate_up"_a,
         "down"_a, "window"_a);

  nb::class_<Decoder>(m, "Decoder")
      .def("__init__", [](Decoder* self, int hidden_size, int intermediate_size, int num_heads, int num_kv_heads,
                          int head_dim, float eps, std::shared_ptr<const Weight> embedding,
                          const LinearLayer* state_projection, std::vector<Layer> layers, const nb::object& norm,
                          Array<const float, 2> cos, Array<const float, 2> sin) {
        new (self) Decoder({hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, eps},
                           std::move(embedding), state_projection != nullptr ? *state_projection : LinearLayer{},
                           std::move(layers), copy(norm), {cos.data(), cos.data() + cos.size()},
                           {sin.data(), sin.data() + sin.size()});
      }, "hidden_size"_a, "intermediate_size"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rms_norm_eps"_a,
         "embedding"_a, "state_projection"_a.none(), "layers"_a, "norm"_a, "cos"_a, "sin"_a);

  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<int, const std::string&>(), "num_threads"_a, "instruction_set"_a)
      .def_prop_ro("instruction_set", [](const Runtime& runtime) { return runtime.kernels().name; })
      .def("pack_quantised", &Runtime::pack_quantised, "bits"_a, "codes"_a, "scales"_a, "minima"_a)
      .def("pack_bf16", &Runtime::pack_bf16, "values"_a)
      .def("linear", &Runtime::linear, "weight"_a, "bias"_a.none(), "x"_a, "out"_a)
      .def("embedding", &Runtime::embedding, "table"_a, "token_ids"_a, "out"_a)
      .def("rms_norm", &Runtime::rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a)
      .def("rope", &Runtime::rope, "x"_a, "cos"_a, "sin"_a)
      .def("silu_gate", &Runtime::silu_gate, "gate_up"_a, "out"_a)
      .def("write_kv", &Runtime::write_kv, "store"_a, "layer"_a, "slots"_a, "k"_a, "v"_a)
      .def("attention", &Runtime::attention, "store"_a, "layer"_a, "sequences"_a, "block_tables"_a, "block_size"_a,
           "window"_a, "q"_a, "out"_a)
      .def("forward", &Runtime::forward, "decoder"_a, "store"_a, "token_ids"_a, "positions"_a, "slots"_a,
           "sequences"_a, "block_tables"_a, "block_size"_a, "states"_a.none(), "hidden"_a, "kv_only"_a)
      .def("draft", &Runtime::draft, "decoder"_a, "head"_a, "store"_a, "states"_a, "token_ids"_a, "start"_a,
           "block_ids"_a, "block_size"_a, "listed"_a, "max_tokens"_a, "rule"_a.none())
      .def("read_weights", &Runtime::read_weights, "decoder"_a);
}

}  // namespace paceline
