// The runtime of Extended Tensor Parallelism, for tessera.etp. Addresses are those of tensors that the package keeps
// alive. Every call that may wait for other ranks releases the GIL, and ends when a signal handler raises.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "choice.h"
#include "etp/schedule/chains.h"
#include "etp_values.h"
#include "layout/text_reader.h"
#include "quantized_copy.h"

namespace tessera::python {
namespace {

using etp::FullWeight;
using etp::GradientBuffer;
using etp::Phase;
using etp::Runtime;
using etp::WeightId;

constexpr Choice<etp::GradientScale> kReductions[] = {{"mean", etp::GradientScale::kMean},
                                                      {"sum", etp::GradientScale::kSum}};
constexpr Choice<etp::PublishAt> kPublications[] = {{"update", etp::PublishAt::kUpdate},
                                                    {"first_use", etp::PublishAt::kFirstUse}};
constexpr Choice<Nonfinite> kNonfinite[] = {{"error", Nonfinite::kError}, {"propagate", Nonfinite::kPropagate}};

// (weight, round, ranks that gave a gradient)
using AddedTuple = std::tuple<WeightId, int64_t, int>;

std::vector<AddedTuple> tuples_of(const std::vector<etp::Added>& added) {
  std::vector<AddedTuple> tuples;
  for (const auto& [weight, round, ranks] : added) tuples.emplace_back(weight, round, ranks);
  return tuples;
}

etp::UpdateOptions update_options(const std::string& what, std::optional<double> timeout) {
  etp::UpdateOptions options{.what = what};
  if (timeout) options.timeout = timeout_from("timeout", timeout, etp::kGroupTimeout);
  return options;
}

nb::typed<nb::list, nb::bytes> begin_write(Runtime& runtime, const std::vector<WeightId>& weights,
                                           const std::string& what, const nb::bytes& told, bool begins,
                                           std::optional<double> timeout) {
  const etp::UpdateOptions options = update_options(what, timeout);
  std::vector<std::string> answers;
  {
    std::string own(told.c_str(), told.size());
    const nb::gil_scoped_release released;
    answers = runtime.begin_write(weights, std::move(own), options, begins);
  }
  nb::list found;
  for (const std::string& each : answers) found.append(nb::bytes(each.data(), each.size()));
  return nb::typed<nb::list, nb::bytes>(found);
}

Runtime* make_runtime(const etp::ShardGroup& group, const std::string& reduction, const std::string& prefetch,
                      int distance, int expert_distance, std::optional<int64_t> cap_bytes, const std::string& publish,
                      const std::string& nonfinite, int replicas, std::optional<bool> check, bool coalesce_amax,
                      const std::optional<std::string>& schedule_log, std::optional<double> stream_bytes_per_second,
                      const std::set<std::string>& graph_scope, bool moe_shared_expert_overlap, bool map_weights) {
  etp::RuntimeOptions options{.replicas = replicas,
                              .scale = chosen("reduction", reduction, kReductions),
                              .prefetch = prefetch_from(prefetch),
                              .distance = distance,
                              .expert_distance = expert_distance,
                              .cap_bytes = cap_bytes,
                              .map_weights = map_weights,
                              .publish = chosen("publish", publish, kPublications),
                              .coalesce_amax = coalesce_amax,
                              .nonfinite = chosen("nonfinite", nonfinite, kNonfinite),
                              .check = check,
                              .schedule_log = schedule_log,
                              .gather_bytes_per_second = stream_bytes_per_second,
                              .reduce_bytes_per_second = stream_bytes_per_second,
                              .while_waiting = [] { SignalHook::look(); },
                              .graph_scope = graph_scope,
                              .moe_shared_expert_overlap = moe_shared_expert_overlap};
  const nb::gil_scoped_release released;
  return new Runtime(group, std::move(options));
}

WeightId add(Runtime& runtime, const std::string& name, int64_t rows, int64_t columns, const std::string& dtype,
             const std::string& format, const std::optional<std::string>& compute,
             const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen, bool native,
             bool planes_only, bool copied) {
  const nb::gil_scoped_release released;
  return runtime.add(spec_of(name, rows, columns, dtype, format, compute, accumulated, pad_for_alignment, frozen,
                             native, planes_only, copied));
}

std::vector<WeightId> add_stack(Runtime& runtime, const std::string& name, int count, int64_t rows, int64_t columns,
                                const std::string& dtype, const std::string& format,
                                const std::optional<std::string>& compute,
                                const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen,
                                bool native, bool planes_only) {
  const nb::gil_scoped_release released;
  return runtime.add_stack(spec_of(name, rows, columns, dtype, format, compute, accumulated, pad_for_alignment, frozen,
                                   native, planes_only, true),
                           count);
}

// This rank's rows of all of them.
nb::object stack_shard(const Runtime& runtime, const std::vector<WeightId>& stack) {
  if (stack.empty()) return nb::none();
  const etp::WeightSpec spec = runtime.spec(stack.front());
  std::byte* const block = runtime.shard(stack.front());
  if (block == nullptr) return nb::none();
  const int64_t rows = runtime.rows(stack.front()).size();
  for (size_t i = 0; i < stack.size(); ++i)
    if (runtime.shard(stack[i]) != block + static_cast<int64_t>(i) * bytes_of(spec.dtype, rows * spec.columns))
      fail(ErrorCode::kInvalidArgument, "{} is not weight {} of a stack: give what add_stack() returned"_message,
           tessera::quoted(runtime.spec(stack[i]).name), i);
  return dlpack_capsule(block, rows * std::ssize(stack), spec.columns, spec.dtype, runtime.shard_keeper(stack.front()));
}

// This rank's rows; None where it has none. The memory lives as long as a tensor over it.
nb::object shard(const Runtime& runtime, WeightId weight) {
  const etp::WeightSpec spec = runtime.spec(weight);
  std::byte* rows = runtime.shard(weight);
  if (rows == nullptr) return nb::none();
  return dlpack_capsule(rows, runtime.rows(weight).size(), spec.columns, spec.dtype, runtime.shard_keeper(weight));
}

std::optional<QuantizedCopyHandle> quantized_copy(const Runtime& runtime, const std::vector<WeightId>& weights) {
  QuantizedCopyHandle found;
  {
    const nb::gil_scoped_release released;
    found.copy = runtime.quantized_copy(weights);
  }
  return found.copy ? std::optional(std::move(found)) : std::nullopt;
}

// Leaves zeros behind.
void take_gradient(Runtime& runtime, WeightId weight, uintptr_t to) {
  const nb::gil_scoped_release released;
  const etp::WeightSpec spec = runtime.spec(weight);
  const int64_t elements = runtime.rows(weight).size() * spec.columns;
  const auto bytes = static_cast<size_t>(bytes_of(spec.accumulated.value_or(DType::kF32), elements));
  void* rows = runtime.gradient(weight);
  std::memcpy(at_address<void>(to), rows, bytes);
  std::memset(rows, 0, bytes);
}

Phase phase_named(const std::string& name) {
  if (name == "fwd") return Phase::kForward;
  if (name == "bwd") return Phase::kBackward;
  if (name == "recompute") return Phase::kRecompute;
  fail(ErrorCode::kInvalidArgument, "phase '{}': 'fwd', 'bwd' and 'recompute' are possible"_message, name);
}

nb::object capsule_of(const std::shared_ptr<FullWeight>& full) {
  const FullWeight& found = *full;
  return dlpack_capsule(found.data(), found.rows(), found.columns(), found.dtype(), full);
}

// (capsule over [F, K], version). The buffer goes back when the tensor's storage goes.
std::pair<nb::object, int64_t> acquire(Runtime& runtime, WeightId weight, const std::string& phase, int micro_batch,
                                       bool expects_backward, bool first_micro_batch, std::optional<int64_t> version) {
  const Phase chosen_phase = phase_named(phase);
  std::shared_ptr<FullWeight> full;
  {
    const nb::gil_scoped_release released;
    full = std::make_shared<FullWeight>(runtime.acquire(weight, chosen_phase,
                                                        {.micro_batch = micro_batch,
                                                         .expects_backward = expects_backward,
                                                         .first_micro_batch = first_micro_batch,
                                                         .version = version}));
  }
  return {capsule_of(full), full->version()};
}

using Versions = std::vector<int64_t>;

// The same for a list of experts; of a stack, one capsule over [count * F, K]. `versions`: those that its forward used.
std::pair<std::vector<nb::object>, Versions> acquire_experts(Runtime& runtime, const std::vector<WeightId>& experts,
                                                             const std::string& phase, int micro_batch,
                                                             bool expects_backward, bool first_micro_batch,
                                                             const std::optional<Versions>& versions) {
  const Phase chosen_phase = phase_named(phase);
  std::vector<std::shared_ptr<FullWeight>> gathered;
  Versions found;
  {
    const nb::gil_scoped_release released;
    for (size_t i = 0; versions && i < std::min(versions->size(), experts.size()); ++i)
      if (runtime.version(experts[i]) != (*versions)[i])  // which is an error that names the expert
        std::ignore = runtime.acquire(experts[i], chosen_phase, {.version = (*versions)[i]});
    for (FullWeight& full : runtime.acquire(experts, chosen_phase,
                                            {.micro_batch = micro_batch,
                                             .expects_backward = expects_backward,
                                             .first_micro_batch = first_micro_batch})) {
      found.push_back(full.version());
      gathered.push_back(std::make_shared<FullWeight>(std::move(full)));
    }
  }
  std::vector<nb::object> capsules;
  for (const auto& full : gathered) capsules.push_back(capsule_of(full));
  return {std::move(capsules), std::move(found)};
}

void produce_experts(Runtime& runtime, const std::vector<GradientBuffer*>& gradients) {
  const nb::gil_scoped_release released;
  std::vector<GradientBuffer> given;
  for (GradientBuffer* gradient : gradients) given.push_back(std::move(*gradient));
  runtime.produce(given);
}

// Room for a gradient: its owner, and a capsule of a tensor that must not be used once it has been produced.
std::pair<nb::object, nb::object> gradient_buffer(Runtime& runtime, WeightId weight, int micro_batch) {
  GradientBuffer buffer;
  {
    const nb::gil_scoped_release released;
    buffer = runtime.gradient_buffer(weight, micro_batch);
  }
  const nb::object capsule = dlpack_capsule(buffer.data(), buffer.rows(), buffer.columns(), buffer.dtype(), nullptr);
  return {nb::cast(std::move(buffer)), capsule};
}

void bind_steps(nb::class_<Runtime>& bound) {
  const nb::call_guard<nb::gil_scoped_release> released;
  bound
      .def("acquire", acquire, nb::arg("weight"), nb::arg("phase"), nb::arg("micro_batch") = 0,
           nb::arg("expects_backward") = false, nb::arg("first_micro_batch") = false, nb::arg("version") = nb::none(),
           nb::sig("def acquire(self, weight: int, phase: str, micro_batch: int = 0, expects_backward: bool = False, "
                   "first_micro_batch: bool = False, version: int | None = None) -> tuple[typing.Any, int]"),
           "Gathers a weight: a DLPack capsule over [F, K], and the version.")
      .def("acquire_experts", acquire_experts, nb::arg("experts"), nb::arg("phase"), nb::arg("micro_batch") = 0,
           nb::arg("expects_backward") = false, nb::arg("first_micro_batch") = false, nb::arg("versions") = nb::none(),
           nb::sig("def acquire_experts(self, experts: collections.abc.Sequence[int], phase: str, micro_batch: int = "
                   "0, expects_backward: bool = False, first_micro_batch: bool = False, versions: "
                   "collections.abc.Sequence[int] | None = None) -> tuple[list[typing.Any], list[int]]"),
           "Gathers a list of experts: DLPack capsules over [F, K], or one over all of a stack; and their versions.")
      .def("gradient_buffer", gradient_buffer, nb::arg("weight"), nb::arg("micro_batch") = 0,
           nb::sig("def gradient_buffer(self, weight: int, micro_batch: int = 0) -> tuple[GradientBuffer, typing.Any]"),
           "Room for a gradient, and a DLPack capsule over it.")
      .def(
          "produce", [](Runtime& runtime, GradientBuffer& buffer) { runtime.produce(std::move(buffer), false); },
          nb::arg("gradient"), released)
      .def("produce_experts", produce_experts, nb::arg("gradients"))
      .def(
          "give_replicated",
          [](Runtime& runtime, uint32_t replicated, uintptr_t gradient, uintptr_t accumulated,
             const std::string& accumulated_dtype) {
            runtime.give_replicated(replicated, at_address<void>(gradient), at_address<void>(accumulated),
                                    parse_dtype(accumulated_dtype));
          },
          nb::arg("replicated"), nb::arg("gradient"), nb::arg("accumulated"), nb::arg("accumulated_dtype"),
          "Addresses, or 0 for no gradient of this rank; they are used by the next drain.")
      .def("replicated_ranks", &Runtime::replicated_ranks,
           "Return how many ranks gave a gradient at the last drain, for each replicated tensor.")
      .def("added", [](Runtime& runtime) { return tuples_of(runtime.added()); })
      .def(
          "drain", [](Runtime& runtime) { return tuples_of(runtime.drain()); }, released)
      .def("abandon", &Runtime::abandon, nb::arg("lost") = false, released)
      .def(
          "begin_update",
          [](Runtime& runtime, const std::vector<WeightId>& weights, const std::string& what,
             std::optional<double> timeout) { runtime.begin_update(weights, update_options(what, timeout)); },
          nb::arg("weights"), nb::arg("what") = "an update", nb::arg("timeout") = nb::none(), released)
      .def("end_update", &Runtime::end_update, released)
      .def("begin_write", begin_write, nb::arg("weights"), nb::arg("what"), nb::arg("told"), nb::arg("begins") = true,
           nb::arg("timeout") = nb::none(),
           "What all ranks have told; a write of these weights has begun if it is the same and `begins` holds.")
      .def("end_write", &Runtime::end_write, released)
      .def("next_step", &Runtime::next_step, released)
      .def(
          "publish", [](Runtime& runtime, const std::vector<WeightId>& weights) { runtime.publish(weights); },
          nb::arg("weights"), released);
}

void bind_adding(nb::class_<Runtime>& bound) {
  bound
      .def("add", add, nb::arg("name"), nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"), nb::arg("format") = "",
           nb::arg("compute") = nb::none(), nb::arg("accumulated") = nb::none(), nb::arg("pad_for_alignment") = 16,
           nb::arg("frozen") = false, nb::arg("native") = false, nb::arg("planes_only") = false,
           nb::arg("copied") = false,
           "copied: uses of it may write what they get; else it is to be read, as it may be the owners' memory.")
      .def("add_stack", add_stack, nb::arg("name"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"),
           nb::arg("dtype"), nb::arg("format") = "", nb::arg("compute") = nb::none(),
           nb::arg("accumulated") = nb::none(), nb::arg("pad_for_alignment") = 16, nb::arg("frozen") = false,
           nb::arg("native") = false, nb::arg("planes_only") = false,
           "Weights NAME[0], NAME[1], ..., which are a list of experts.")
      .def(
          "add_experts", [](Runtime& runtime, const std::vector<WeightId>& experts) { runtime.add_experts(experts); },
          nb::arg("experts"))
      .def(
          "add_replicated",
          [](Runtime& runtime, const std::string& name, int64_t elements, const std::string& dtype) {
            return runtime.add_replicated(name, elements, parse_dtype(dtype));
          },
          nb::arg("name"), nb::arg("elements"), nb::arg("dtype"));
}

void bind_weights(nb::class_<Runtime>& bound) {
  const nb::call_guard<nb::gil_scoped_release> released;
  bound.def("start", &Runtime::start, released)
      .def(
          "rows",
          [](const Runtime& runtime, WeightId weight) {
            const etp::RowRange rows = runtime.rows(weight);
            return std::pair(rows.begin, rows.end);
          },
          nb::arg("weight"))
      .def("shard_rows", &Runtime::shard_rows, nb::arg("weight"), "With padding, of every rank.")
      .def("version", &Runtime::version, nb::arg("weight"))
      .def("is_mapped", &Runtime::is_mapped, nb::arg("weight"),
           "Whether uses of it read the owners' memory, which they must not write.")
      .def("status", &Runtime::status, nb::arg("weight"))
      .def("shard", shard, nb::arg("weight"), nb::sig("def shard(self, weight: int) -> typing.Any"),
           "A DLPack capsule over this rank's rows; None where it has none.")
      .def("stack_shard", stack_shard, nb::arg("stack"),
           nb::sig("def stack_shard(self, stack: collections.abc.Sequence[int]) -> typing.Any"),
           "A DLPack capsule over this rank's rows of all weights of a stack; None where it has none.")
      .def("quantized_copy", quantized_copy, nb::arg("weights"),
           "The planes that are published of this rank's rows of these weights, for the tensor bus; None where there "
           "are "
           "none of use.")
      .def(
          "set_master",
          [](Runtime& runtime, WeightId weight, uintptr_t rows, const std::string& dtype) {
            runtime.set_master(weight, at_address<const void>(rows), parse_dtype(dtype));
          },
          nb::arg("weight"), nb::arg("rows"), nb::arg("dtype"),
          "The address of what a native weight is quantised from at each publication; of one with planes_only, at the "
          "next.")
      .def(
          "read_rows",
          [](const Runtime& runtime, WeightId weight, uintptr_t to, const std::string& dtype) {
            runtime.read_rows(weight, at_address<void>(to), parse_dtype(dtype));
          },
          nb::arg("weight"), nb::arg("to"), nb::arg("dtype"), released,
          "Writes what uses of the weight see of this rank's rows to an address.")
      .def(
          "set_gradient",
          [](Runtime& runtime, WeightId weight, uintptr_t rows, const std::string& dtype, bool empty) {
            runtime.set_gradient(weight, at_address<void>(rows), parse_dtype(dtype), empty);
          },
          nb::arg("weight"), nb::arg("rows"), nb::arg("dtype"), nb::arg("empty") = false,
          "Where folds add; 0: memory of the runtime's own. `empty`: the first fold does not read it.")
      .def("take_gradient", take_gradient, nb::arg("weight"), nb::arg("to"),
           "Moves what has been folded into the runtime's own memory to an address.")
      .def("set_frozen", &Runtime::set_frozen, nb::arg("weight"), nb::arg("frozen"), released)
      .def(
          "remove", [](Runtime& runtime, const std::vector<WeightId>& weights) { runtime.remove(weights); },
          nb::arg("weights"), released,
          "This rank uses these weights no more. Their memory is freed once all ranks have said so.")
      .def("classify", &Runtime::classify, nb::arg("graph_scope"), nb::arg("moe_shared_expert_overlap") = false);
}

void bind_status(nb::module_& module) {
  using Status = etp::WeightStatus;
  nb::class_<Status>(module, "EtpStatus", "What of a weight is under way, and what is used around it.")
      .def_ro("gather", &Status::gather)
      .def_ro("reduction", &Status::reduction)
      .def_ro("prev", &Status::prev)
      .def_ro("next", &Status::next)
      .def_ro("expert", &Status::expert)
      .def_ro("chain", &Status::chain);
}

void bind_streams(nb::module_& module) {
  using Stream = etp::StreamInfo;
  nb::class_<Stream>(module, "EtpStream", "On which weights and gradients move beside the computation.")
      .def_ro("name", &Stream::name)
      .def_ro("chain", &Stream::chain)
      .def_ro("gathers", &Stream::gathers)
      .def_ro("idle", &Stream::idle);
}

}  // namespace

void bind_etp_runtime(nb::module_& module) {
  const nb::class_<GradientBuffer> buffer(module, "GradientBuffer", "Room for a gradient in shared memory.");
  module.def(
      "check_graph_scope",
      [](const std::set<std::string>& names) {
        etp::GraphScope::of(std::vector<std::string>(names.begin(), names.end()), false);
      },
      nb::arg("names"), "Throws for a name that no part of a model that can be captured has.");
  bind_status(module);
  bind_streams(module);
  nb::class_<Runtime> bound(module, "EtpRuntime", "The weights of one model; tessera.etp is built on it.");
  bound.def(nb::new_(&make_runtime), nb::arg("group"), nb::arg("reduction") = "mean", nb::arg("prefetch") = "auto",
            nb::arg("distance") = 1, nb::arg("expert_distance") = 2, nb::arg("cap_bytes") = nb::none(),
            nb::arg("publish") = "update", nb::arg("nonfinite") = "error", nb::arg("replicas") = 1,
            nb::arg("check") = nb::none(), nb::arg("coalesce_amax") = true, nb::arg("schedule_log") = nb::none(),
            nb::arg("stream_bytes_per_second") = nb::none(), nb::arg("graph_scope") = std::set<std::string>(),
            nb::arg("moe_shared_expert_overlap") = false, nb::arg("map_weights") = true);
  bind_adding(bound);
  bind_weights(bound);
  bind_steps(bound);
  const nb::call_guard<nb::gil_scoped_release> released;
  bound.def("streams", &Runtime::streams, released)
      .def("synchronize", &Runtime::synchronize, nb::arg("chain"), nb::arg("gathers"), released)
      .def("report", &Runtime::report, released)
      .def("forecast", &Runtime::forecast, released)
      .def("explain", &Runtime::explain, nb::arg("step") = -1, released)
      .def("close", &Runtime::close, released);
}

}  // namespace tessera::python
