// ShardGroup: the ranks that share weights, and what they exchange beside a runtime.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/fail.h"
#include "collective/group.h"
#include "collective/leftovers.h"
#include "collective/movement/memory_reader.h"
#include "collective/movement/sequence.h"
#include "etp_values.h"
#include "tessera/store.h"
#include "waiting.h"

namespace tessera::python {
namespace {

using etp::ShardGroup;

ShardGroup::Options options_from(const std::string& name, std::optional<double> timeout) {
  return {.name = name, .timeout = timeout_from("timeout", timeout, etp::kGroupTimeout)};
}

std::string text_of(nb::handle blob) {
  const auto bytes = nb::cast<nb::bytes>(blob);
  return {bytes.c_str(), bytes.size()};
}

// Bytes in, bytes out: nothing that a peer sends is taken for Python objects.
ShardGroup form_over(const nb::callable& exchange, int rank, int size, const std::string& name,
                     std::optional<double> timeout) {
  const ShardGroup::Options options = options_from(name, timeout);
  const nb::gil_scoped_release released;
  const SignalHook hook;
  return ShardGroup::over(
      [&](const std::string& blob) {
        const nb::gil_scoped_acquire acquired;
        std::vector<std::string> blobs;
        const nb::object answer = exchange(nb::bytes(blob.data(), blob.size()));
        for (const nb::handle each : answer) blobs.push_back(text_of(each));
        return blobs;
      },
      rank, size, options);
}

ShardGroup form_over_store(const std::string& url, const std::string& key, int rank, int size, const std::string& name,
                           std::optional<double> timeout) {
  const ShardGroup::Options options = options_from(name, timeout);
  ShardGroup group = ShardGroup::single({});
  call_interruptibly([&](const std::stop_token& stop) {
    const std::unique_ptr<Store> store = open_store(url, {.stop = stop});
    const std::stop_callback closes(stop, [&] { store->close(); });  // a store that does not answer is waited for, too
    group = ShardGroup::over_store(*store, key, rank, size, options, stop);
  });
  return group;
}

// Another group of the same ranks. Nothing but the group itself carries its bootstrap.
ShardGroup derive(const ShardGroup& group, const std::string& name) {
  const nb::gil_scoped_release released;
  const SignalHook hook;
  const ShardGroup::Options options{.name = name, .timeout = group.impl()->timeout()};
  if (group.size() == 1) return ShardGroup::single(options);
  return ShardGroup::over([&](std::string blob) { return group.impl()->exchange("form " + name, std::move(blob)); },
                          group.rank(), group.size(), options);
}

nb::typed<nb::list, nb::bytes> exchange(const ShardGroup& group, const std::string& what, const nb::bytes& blob) {
  std::vector<std::string> blobs;
  {
    std::string own = text_of(blob);
    const nb::gil_scoped_release released;
    const SignalHook hook;
    blobs = group.impl()->exchange(what, std::move(own));
  }
  nb::list found;
  for (const std::string& each : blobs) found.append(nb::bytes(each.data(), each.size()));
  return nb::typed<nb::list, nb::bytes>(found);
}

// The error is the caller's: it has raised, or will raise, its own.
void refuse(const ShardGroup& group, const std::string& what, const std::string& text, const std::string& code,
            bool forwarded) {
  const nb::gil_scoped_release released;
  const SignalHook hook;
  group.impl()->refuse(what, {error_code_named(code), text}, forwarded);
}

// (code, text, whether it is this rank's own)
std::optional<std::tuple<std::string, nb::str, bool>> latest_refusal(const ShardGroup& group) {
  const auto latest = group.impl()->latest_refusal();
  if (!latest) return std::nullopt;
  return std::tuple(std::string(to_string(latest->reason.code())), str_of(latest->reason.message()), latest->own);
}

constexpr size_t kGatherBytes = size_t{64} << 20;  // of a rank at a time

// Concatenates the ranks' bytes at `to`, in rank order. They are sent in pieces, so that copies stay small.
void gather_bytes(const ShardGroup& group, const std::string& what, uintptr_t from, const std::vector<size_t>& bytes,
                  uintptr_t to) {
  const auto rank = static_cast<size_t>(group.rank());
  if (bytes.size() != static_cast<size_t>(group.size()))
    fail(ErrorCode::kInvalidArgument, "{}: sizes of {} ranks in a group of {}"_message, what, bytes.size(),
         group.size());
  const nb::gil_scoped_release released;
  const SignalHook hook;
  const size_t longest = *std::ranges::max_element(bytes);
  for (size_t at = 0; at < longest; at += kGatherBytes) {
    const auto piece = [&](size_t r) { return std::min(bytes[r] - std::min(at, bytes[r]), kGatherBytes); };
    std::string own(piece(rank), '\0');
    if (!own.empty()) std::memcpy(own.data(), at_address<std::byte>(from) + at, own.size());
    const std::vector<std::string> pieces = group.impl()->exchange(what, std::move(own));
    auto* place = at_address<std::byte>(to);
    for (size_t r = 0; r < pieces.size(); ++r) {
      if (pieces[r].size() != piece(r))
        fail(ErrorCode::kMismatch, "{}: {} sent {} bytes, not {}"_message, what,
             group.impl()->describe(static_cast<int>(r)), pieces[r].size(), piece(r));
      if (!pieces[r].empty()) std::memcpy(place + at, pieces[r].data(), pieces[r].size());
      place += bytes[r];
    }
  }
}

using collective::MemoryRead;
using collective::MemoryReader;

void form_reader(MemoryReader* self, const ShardGroup& group, int threads) {
  const nb::gil_scoped_release released;
  const SignalHook hook;
  new (self) MemoryReader(group.impl(), threads);
}

// (rank, arena, offset, bytes, address here)
using ReadTuple = std::tuple<int, uint32_t, uint64_t, uint64_t, uintptr_t>;

void read(MemoryReader& reader, const std::vector<ReadTuple>& tuples) {
  const nb::gil_scoped_release released;
  const SignalHook hook;
  std::vector<MemoryRead> reads;
  reads.reserve(tuples.size());
  for (const auto& [rank, arena, offset, bytes, to] : tuples)
    reads.push_back(
        {.rank = rank, .from = {.arena = arena, .offset = offset, .bytes = bytes}, .to = at_address<std::byte>(to)});
  reader.read(reads);
}

// A rank that may read the others' memory.
struct Reading {
  std::shared_ptr<const void> token;
};

void keep_for_readers(const ShardGroup& group, nb::object memory) {
  const std::shared_ptr<const void> kept(memory.release().ptr(), [](const void* object) {
    const nb::gil_scoped_acquire acquired;
    Py_DECREF(static_cast<PyObject*>(const_cast<void*>(object)));
  });
  collective::Leftovers::of_process().keep(group.impl()->readers(), kept);
}

void bind_reader(nb::module_& module) {
  module.def(
      "set_sequence",
      [](uintptr_t address, uint64_t count) { collective::set_sequence(*at_address<uint64_t>(address), count); },
      nb::arg("address"), nb::arg("count"),
      "Stores the count of what other processes read meanwhile, odd while it is written: they see it behind all that "
      "this thread has written, and before all that it writes next.");
  nb::class_<MemoryReader>(module, "MemoryReader",
                           "Reads what the ranks of a group have in their memory, where they say that it is.")
      .def("__init__", form_reader, nb::arg("group"), nb::arg("threads") = 0, "Collective.")
      .def_prop_ro("refused", &MemoryReader::refused,
                   "Why private memory cannot be read between some ranks; empty if it can. The same on all ranks.")
      .def(
          "refer",
          [](const MemoryReader& reader, uintptr_t address, size_t bytes) {
            const collective::MemoryRef place = reader.refer(at_address<std::byte>(address), bytes);
            return std::tuple(place.arena, place.offset);
          },
          nb::arg("address"), nb::arg("bytes"),
          "(arena, offset) for peers. If private memory cannot be read, it must be shared_bytes().")
      .def("read", read, nb::arg("reads"),
           "Copies each (rank, arena, offset, bytes, address here). A later call reads nothing that is older.");
}

}  // namespace

void bind_etp_group(nb::module_& module) {
  const nb::class_<Reading> reading(module, "Reading", "What ShardGroup.reading() returns.");
  nb::class_<ShardGroup>(module, "ShardGroup",
                         "Ranks of one host that share weights. Collective calls are made by all ranks in one order.")
      .def_static(
          "single", [](const std::string& name) { return ShardGroup::single({.name = name}); }, nb::arg("name"))
      .def_static("over", form_over, nb::arg("exchange"), nb::arg("rank"), nb::arg("size"), nb::arg("name"),
                  nb::arg("timeout") = nb::none(),
                  nb::sig("def over(exchange: collections.abc.Callable[[bytes], list[bytes]], rank: int, size: int, "
                          "name: str, timeout: float | None = None) -> ShardGroup"),
                  "Blocks until all ranks have joined. `exchange` gives every rank's bytes, in rank order.")
      .def_static("over_store", form_over_store, nb::arg("url"), nb::arg("key"), nb::arg("rank"), nb::arg("size"),
                  nb::arg("name"), nb::arg("timeout") = nb::none(), "Likewise, by way of a store.")
      .def("derive", derive, nb::arg("name"), "Collective: another group of the same ranks.")
      .def("exchange", exchange, nb::arg("what"), nb::arg("blob"), "Collective: every rank's bytes, in rank order.")
      .def("refuse", refuse, nb::arg("what"), nb::arg("text"), nb::arg("code") = "invalid-argument",
           nb::arg("forwarded") = false,
           "Takes part in the next collective call with a refusal: on the other ranks that call raises the error of "
           "`code`, \"rank R: \" and `text`; `text` alone if it is `forwarded`, since it names the rank that has "
           "refused. Does not wait for "
           "them. The group stays usable.")
      .def_prop_ro(
          "refusals", [](const ShardGroup& group) { return group.impl()->refusals(); },
          "How many refusals this rank has told or been told.")
      .def_prop_ro(
          "latest_refusal", latest_refusal,
          "(code, text, whether it is this rank's own) of the last one; of another's, the text names its rank.")
      .def("gather_bytes", gather_bytes, nb::arg("what"), nb::arg("address"), nb::arg("bytes"), nb::arg("to"),
           "Collective: concatenates what lies at every rank's `address`, of the sizes `bytes`, at `to`.")
      .def("close",
           [](ShardGroup& group) {
             const nb::gil_scoped_release released;
             const SignalHook hook;
             group.close();
           })
      .def(
          "reading", [](const ShardGroup& group) { return Reading{group.impl()->reading()}; },
          "While what it returns lives, other ranks keep what they have shown this one, also once they want it no "
          "more.")
      .def("keep_for_readers", keep_for_readers, nb::arg("memory"),
           "Keeps an object until no other rank of the group reads, which reading() tells. Does not wait.")
      .def("leave", &ShardGroup::leave, nb::call_guard<nb::gil_scoped_release>(), "close() without waiting.")
      .def_prop_ro("rank", &ShardGroup::rank)
      .def_prop_ro("size", &ShardGroup::size);
  bind_reader(module);
}

}  // namespace tessera::python
