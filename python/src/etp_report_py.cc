// What Extended Tensor Parallelism tells of memory and of a run, for tessera.etp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>
#include <utility>

#include "etp/model_forecast.h"
#include "etp_values.h"

namespace tessera::python {
namespace {

using etp::ModelToShard;
using Forecast = etp::RuntimeForecast;
using Report = etp::RuntimeReport;

std::string report_text(const Report& self) {
  return fmt::format(
      "Report(rank={}, size={}, weights={}, shard_bytes={}, publication_bytes={}, master_bytes={}, "
      "gradient_bytes={}, gathered_bytes={}, gathered_peak_bytes={}, produced_bytes={}, produced_peak_bytes={}, "
      "replicated_bytes={}, consumptions={}, prefetched={}, on_demand={}, bytes_gathered={}, rounds={}, updates={}, "
      "exposed_seconds={:.3g})",
      self.rank, self.size, self.weights.size(), self.shard_bytes, self.publication_bytes, self.master_bytes,
      self.gradient_bytes, self.gathered_bytes, self.gathered_peak_bytes, self.produced_bytes, self.produced_peak_bytes,
      self.replicated_bytes, self.consumptions, self.prefetched, self.on_demand, self.bytes_gathered, self.rounds,
      self.updates, self.exposed_seconds);
}

void bind_weight_report(nb::module_& module) {
  using Weight = Report::Weight;
  nb::class_<Weight>(module, "WeightReport", "What this rank holds of one weight, in bytes.")
      .def_ro("name", &Weight::name)
      .def_prop_ro(
          "rows", [](const Weight& self) { return std::pair(self.rows.begin, self.rows.end); },
          "First and last + 1 of this rank's rows.")
      .def_ro("version", &Weight::version, "That was published last.")
      .def_ro("chain", &Weight::chain)
      .def_ro("format", &Weight::format, "What travels.")
      .def_ro("frozen", &Weight::frozen)
      .def_ro("shard_bytes", &Weight::shard_bytes, "Its rows in shared memory.")
      .def_ro("publication_bytes", &Weight::publication_bytes, "What peers read, if that is not the rows themselves.")
      .def_ro("master_bytes", &Weight::master_bytes, "Rows of a native weight, which are memory of torch.")
      .def_ro("gradient_bytes", &Weight::gradient_bytes, "Gradient rows in memory of the runtime; others are torch's.")
      .def_ro("gathered_bytes", &Weight::gathered_bytes, "Of buffers that hold it now.");
  nb::class_<Report::Key>(module, "PoolReport", "Buffers of gathered weights that may replace each other, in bytes.")
      .def_ro("key", &Report::Key::key, "Shape, format and chain, in words.")
      .def_ro("bytes", &Report::Key::bytes, "Now.")
      .def_ro("peak_bytes", &Report::Key::peak_bytes, "At the most.");
}

void bind_report(nb::module_& module) {
  nb::class_<Report> bound(module, "Report",
                           "What a model holds on this rank now, in bytes, and what happened since it was sharded.");
  bound.def_ro("rank", &Report::rank)
      .def_ro("size", &Report::size, "Ranks, of all replicas.")
      .def_ro("weights", &Report::weights)
      .def_ro("keys", &Report::keys, "The pools of gathered weights.")
      .def_ro("shard_bytes", &Report::shard_bytes, "This rank's rows, in shared memory.")
      .def_ro("publication_bytes", &Report::publication_bytes, "Planes of weights with a format, in shared memory.")
      .def_ro("master_bytes", &Report::master_bytes, "Rows of native weights, in memory of torch.")
      .def_ro("gradient_bytes", &Report::gradient_bytes,
              "Gradient rows in memory of the runtime: 0 where they are .grad or main_grad.")
      .def_ro("gathered_bytes", &Report::gathered_bytes, "Whole weights, in memory of this rank.")
      .def_ro("gathered_peak_bytes", &Report::gathered_peak_bytes, "At the most so far.")
      .def_ro("mapped_bytes", &Report::mapped_bytes,
              "Addresses of whole weights that are read in their owners' memory, and take none of their own.")
      .def_ro("produced_bytes", &Report::produced_bytes, "Buffers of whole gradients, in shared memory.")
      .def_ro("produced_peak_bytes", &Report::produced_peak_bytes, "At the most so far.")
      .def_ro("replicated_bytes", &Report::replicated_bytes,
              "The bucket in which gradients of what is whole are added, in shared memory.");
  bound.def_ro("consumptions", &Report::consumptions, "Uses of weights that found them gathered or gathered them.")
      .def_ro("prefetched", &Report::prefetched, "Uses that found their weight gathered, or on its way.")
      .def_ro("on_demand", &Report::on_demand, "Uses that did not.")
      .def_ro("in_place", &Report::in_place, "Uses of the shard itself, where a replica has one rank.")
      .def_ro("mapped", &Report::mapped, "Uses of the owners' memory, of which nothing was copied.")
      .def_ro("mispredicted", &Report::mispredicted, "Prefetches that nobody used.")
      .def_ro("refused", &Report::refused, "Prefetches that did not fit below cap_bytes.")
      .def_ro("over_cap", &Report::over_cap, "Buffers beyond cap_bytes, for uses at one time that need more.")
      .def_ro("bytes_gathered", &Report::bytes_gathered, "That travelled.")
      .def_ro("rounds", &Report::rounds, "Gradients that this rank produced.")
      .def_ro("folds", &Report::folds, "Additions to rows of this rank.")
      .def_ro("left_out", &Report::left_out, "Gradients that another rank did not give for a round.")
      .def_ro("pool_grown", &Report::pool_grown, "Gradient buffers beyond three of a size.")
      .def_ro("room_waits", &Report::room_waits, "Gradients that waited for a buffer.")
      .def_ro("publications", &Report::publications, "Of weights.")
      .def_ro("max_exchanges", &Report::max_exchanges,
              "Agreements on the largest values of weights that are quantised.")
      .def_ro("drains", &Report::drains)
      .def_ro("updates", &Report::updates)
      .def_ro("writes", &Report::writes, "Of weights, between updates.")
      .def_ro("write_seconds", &Report::write_seconds, "That writes waited for other ranks and their reads.")
      .def_ro("exposed_seconds", &Report::exposed_seconds, "That uses waited for their weights.")
      .def("__repr__", report_text);
}

void bind_forecast(nb::module_& module) {
  nb::class_<Forecast>(module, "Forecast", "Bytes that a rank will hold at its peak, before the first step.")
      .def_ro("parameters", &Forecast::parameters, "This rank's rows, in shared memory.")
      .def_ro("publication", &Forecast::publication, "Planes of weights with a format, in shared memory.")
      .def_ro("gradients", &Forecast::gradients, "Gradient rows, such as .grad.")
      .def_ro("gathered", &Forecast::gathered, "Whole weights: the most that each pool holds.")
      .def_ro("produced", &Forecast::produced, "Whole gradients that are not added yet, in shared memory.")
      .def_ro("replicated", &Forecast::replicated,
              "The bucket in which gradients of what is whole are added, in shared memory.")
      .def_ro("masters", &Forecast::masters, "Rows of native weights, in memory of torch; not in the total.")
      .def_prop_ro("total", &Forecast::total, "All of them, without the masters.")
      .def("__repr__", [](const Forecast& self) {
        return fmt::format(
            "Forecast(parameters={}, publication={}, gradients={}, gathered={}, produced={}, replicated={}, "
            "masters={}, total={})",
            self.parameters, self.publication, self.gradients, self.gathered, self.produced, self.replicated,
            self.masters, self.total());
      });
}

Forecast forecast_of(const ModelToShard& model, int rank, int ranks, int replicas, const std::string& prefetch,
                     int distance, int expert_distance, std::optional<int64_t> cap_bytes,
                     const std::set<std::string>& graph_scope, bool moe_shared_expert_overlap, bool map_weights,
                     std::optional<bool> check, bool paced) {
  return etp::forecast_model(model, rank, ranks,
                             {.replicas = replicas,
                              .prefetch = prefetch_from(prefetch),
                              .distance = distance,
                              .expert_distance = expert_distance,
                              .cap_bytes = cap_bytes,
                              .map_weights = map_weights && !paced,
                              .check = check,
                              .graph_scope = graph_scope,
                              .moe_shared_expert_overlap = moe_shared_expert_overlap});
}

// Its calls are those of EtpRuntime with the same names.
void bind_model(nb::module_& module) {
  nb::class_<ModelToShard>(module, "EtpModel", "What would be told to an EtpRuntime; for a forecast without one.")
      .def(nb::init<>())
      .def(
          "add",
          [](ModelToShard& self, const std::string& name, int64_t rows, int64_t columns, const std::string& dtype,
             const std::string& format, const std::optional<std::string>& compute,
             const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen, bool native,
             bool planes_only, bool copied) {
            self.weights.push_back({spec_of(name, rows, columns, dtype, format, compute, accumulated, pad_for_alignment,
                                            frozen, native, planes_only, copied)});
            return self.weights.size() - 1;
          },
          nb::arg("name"), nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"), nb::arg("format") = "",
          nb::arg("compute") = nb::none(), nb::arg("accumulated") = nb::none(), nb::arg("pad_for_alignment") = 16,
          nb::arg("frozen") = false, nb::arg("native") = false, nb::arg("planes_only") = false,
          nb::arg("copied") = false)
      .def(
          "add_stack",
          [](ModelToShard& self, const std::string& name, int count, int64_t rows, int64_t columns,
             const std::string& dtype, const std::string& format, const std::optional<std::string>& compute,
             const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen, bool native,
             bool planes_only) {
            self.weights.push_back({spec_of(name, rows, columns, dtype, format, compute, accumulated, pad_for_alignment,
                                            frozen, native, planes_only, true),
                                    count});
            return self.weights.size() - 1;
          },
          nb::arg("name"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"),
          nb::arg("format") = "", nb::arg("compute") = nb::none(), nb::arg("accumulated") = nb::none(),
          nb::arg("pad_for_alignment") = 16, nb::arg("frozen") = false, nb::arg("native") = false,
          nb::arg("planes_only") = false)
      .def(
          "add_experts", [](ModelToShard& self, const std::vector<size_t>& experts) { self.lists.push_back(experts); },
          nb::arg("experts"), "By what add() returned.")
      .def(
          "add_replicated",
          [](ModelToShard& self, int64_t elements, const std::string& dtype) {
            self.replicated.push_back(bytes_of(parse_dtype(dtype), elements));
          },
          nb::arg("elements"), nb::arg("dtype"))
      .def("forecast", forecast_of, nb::arg("rank"), nb::arg("ranks"), nb::arg("replicas") = 1,
           nb::arg("prefetch") = "auto", nb::arg("distance") = 1, nb::arg("expert_distance") = 2,
           nb::arg("cap_bytes") = nb::none(), nb::arg("graph_scope") = std::set<std::string>(),
           nb::arg("moe_shared_expert_overlap") = false, nb::arg("map_weights") = true, nb::arg("check") = nb::none(),
           nb::arg("paced") = false);
}

}  // namespace

void bind_etp_report(nb::module_& module) {
  bind_weight_report(module);
  bind_report(module);
  bind_forecast(module);
  bind_model(module);
}

}  // namespace tessera::python
