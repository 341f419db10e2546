// Checkpoints: read slice by slice, and written by several processes. Tensors are (name, dtype, shape); a region is the
// intervals (begin, end) of each dim, ascending.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "base/fail.h"
#include "bindings.h"
#include "checkpoint/region_digest.h"
#include "etp_values.h"
#include "tessera/checkpoint.h"

namespace tessera::python {
namespace {

using Intervals = std::vector<std::vector<std::pair<Index, Index>>>;
using TensorTuple = std::tuple<std::string, std::string, Shape>;
using Metadata = std::map<std::string, std::string>;

Region region_from(const Intervals& dims) {
  std::vector<IntervalSet> sets;
  for (const auto& dim : dims) {
    std::vector<Interval> intervals;
    for (const auto& [begin, end] : dim) {
      const Index last = intervals.empty() ? std::min<Index>(begin, 0) : intervals.back().end;
      if (begin < last || end <= begin)
        fail(ErrorCode::kInvalidArgument, "region: the interval {} to {} is empty, or not after the one before"_message,
             begin, end);
      intervals.push_back({begin, end});
    }
    sets.push_back(IntervalSet::of_sorted(intervals));
  }
  return Region(std::move(sets));
}

std::vector<TensorInfo> infos_from(const std::vector<TensorTuple>& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, dtype, shape] : tensors) infos.push_back({name, parse_dtype(dtype), shape});
  return infos;
}

nb::list tensors_of(const Checkpoint& checkpoint) {
  nb::list tensors;
  for (const TensorInfo& info : checkpoint.tensors())
    tensors.append(nb::make_tuple(info.name, std::string(to_string(info.dtype)), int_tuple(info.shape)));
  return tensors;
}

size_t read_slice(const Checkpoint& checkpoint, const std::string& name, const Intervals& dims, uintptr_t address,
                  size_t room) {
  const nb::gil_scoped_release released;
  const TensorInfo* info = checkpoint.find(name);
  const Region region = region_from(dims);
  const size_t bytes = info == nullptr ? 0 : static_cast<size_t>(bytes_of(info->dtype, region.size()));
  TESSERA_CHECK_LE(bytes, room);
  checkpoint.read_slice(name, region, {at_address<std::byte>(address), bytes});
  return bytes;
}

void bind_reader(nb::module_& module) {
  nb::class_<Checkpoint>(module, "Checkpoint", "A safetensors file, or several with an index, opened for reading.")
      .def_static(
          "open",
          [](const std::string& path) {
            const nb::gil_scoped_release released;
            return Checkpoint::open(path);
          },
          nb::arg("path"), "A file, an index, or a folder that holds exactly one of either.")
      .def_prop_ro("path", [](const Checkpoint& self) { return str_of(self.path().string()); })
      .def_prop_ro("tensors", tensors_of, nb::sig("def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]"),
                   "(name, dtype, shape) of each, in the order of their bytes, file by file.")
      .def_prop_ro("metadata", &Checkpoint::metadata, "Of the first file.")
      .def_prop_ro("checksums", &Checkpoint::checksums,
                   "Digests of tensors as they lie in the files, by name; empty if none are noted.")
      .def("read_slice", read_slice, nb::arg("name"), nb::arg("region"), nb::arg("address"), nb::arg("room"),
           "Reads the elements of a region to `address`, packed; returns their bytes, at most `room`.");
}

void bind_writer(nb::module_& module) {
  nb::class_<SharedSafetensors>(module, "SharedSafetensors",
                                "A safetensors file that several processes write, each its slices.")
      .def_static(
          "create",
          [](const std::string& path, const std::vector<TensorTuple>& tensors, const Metadata& metadata) {
            const nb::gil_scoped_release released;
            return SharedSafetensors::create(path, infos_from(tensors), metadata);
          },
          nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"),
          "For one process: reserves the whole size and writes the header.")
      .def_static(
          "open",
          [](const std::string& path, const std::vector<TensorTuple>& tensors, const Metadata& metadata) {
            const nb::gil_scoped_release released;
            return SharedSafetensors::open(path, infos_from(tensors), metadata);
          },
          nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"), "For the others: with the same tensors.")
      .def(
          "write_slice",
          [](const SharedSafetensors& self, const std::string& name, const Intervals& dims, uintptr_t address,
             size_t bytes) {
            const nb::gil_scoped_release released;
            self.write_slice(name, region_from(dims), {at_address<const std::byte>(address), bytes});
          },
          nb::arg("name"), nb::arg("region"), nb::arg("address"), nb::arg("bytes"),
          "Writes the elements of a region, which lie packed at `address`.")
      .def(
          "sync",
          [](const SharedSafetensors& self) {
            const nb::gil_scoped_release released;
            self.sync();
          },
          "Waits until what this process has written is on the disk.")
      .def_prop_ro("bytes", &SharedSafetensors::bytes, "Of the whole file.");
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
  bind_reader(module);
  bind_writer(module);
  module.def(
      "write_safetensors",
      [](const std::string& path, const std::vector<std::tuple<std::string, std::string, Shape, uintptr_t>>& tensors,
         const Metadata& metadata) {
        const nb::gil_scoped_release released;
        std::vector<TensorView> views;
        for (const auto& [name, dtype, shape, address] : tensors)
          views.push_back({name, parse_dtype(dtype), shape, at_address<const std::byte>(address)});
        return write_safetensors(path, views, metadata);
      },
      nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"),
      "Writes a file of whole tensors, (name, dtype, shape, address) each; returns its size.");
  module.def(
      "spread_over_files",
      [](const std::vector<TensorTuple>& tensors, int files) { return spread_over_files(infos_from(tensors), files); },
      nb::arg("tensors"), nb::arg("files"), "Which file each tensor goes to, so that they have about equal bytes.");
  module.def(
      "region_digest",
      [](const std::string& dtype, const Shape& shape, const Intervals& dims, uintptr_t address) {
        const nb::gil_scoped_release released;
        const DType type = parse_dtype(dtype);
        const Region region = region_from(dims);
        const auto bytes = static_cast<size_t>(bytes_of(type, region.size()));
        const Digest digest =
            checkpoint::digest_of_region(type, shape, region, {at_address<const std::byte>(address), bytes});
        return std::tuple(digest.d[0], digest.d[1]);
      },
      nb::arg("dtype"), nb::arg("shape"), nb::arg("region"), nb::arg("address"),
      "The digest of a region's elements, which lie packed at `address` (docs/formats/digest.md): those of disjoint "
      "regions add up, modulo 2^64.");
}

}  // namespace tessera::python
