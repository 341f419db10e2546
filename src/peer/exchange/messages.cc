#include "peer/exchange/messages.h"

namespace tessera {
namespace {

constexpr uint32_t kMaxArenas = 1 << 16;

}  // namespace

void Attached::write(ByteWriter& out) const {
  out.put(slots);
  out.put(static_cast<uint32_t>(arenas.size()));
  for (const ArenaDesc& arena : arenas) arena.write(out);
  out.put(more_arenas);
  out.put(static_cast<uint32_t>(places.size()));
  for (const Place& place : places) {
    place.memory.write(out);
    out.put(place.origin);
    out.put(static_cast<uint8_t>(place.strides.size()));
    for (const Index stride : place.strides) out.put(stride);
    out.put(place.slot_bytes);
    out.put(place.delta.has_value());
    if (!place.delta) continue;
    place.delta->write(out);
    out.put(place.delta_slot_bytes);
  }
}

Attached Attached::read(ByteReader& in) {
  Attached attached;
  attached.slots = in.get<uint32_t>();
  if (attached.slots < 1 || attached.slots > kMaxSlots)
    fail(ErrorCode::kInvalidArgument, "Attached: {} slots", attached.slots);
  for (uint32_t count = in.get_count(kMaxArenas, 12); count > 0; --count)
    attached.arenas.push_back(ArenaDesc::read(in));
  attached.more_arenas = in.get_bool();
  for (uint32_t count = in.get_count(kMaxRoutes, 10); count > 0; --count) {
    Place place;
    place.memory = MemoryDesc::read(in);
    place.origin = in.get<uint64_t>();
    const auto dims = in.get<uint8_t>();
    if (dims > kMaxDims) fail(ErrorCode::kInvalidArgument, "Attached: a tensor of {} dims", dims);
    for (int d = 0; d < dims; ++d) place.strides.push_back(in.get<Index>());
    place.slot_bytes = in.get<uint64_t>();
    if (in.get_bool()) {
      place.delta = MemoryDesc::read(in);
      place.delta_slot_bytes = in.get<uint64_t>();
    }
    attached.places.push_back(std::move(place));
  }
  return attached;
}

void Prepare::write(ByteWriter& out) const {
  out.put(ring);
  out.put(static_cast<uint32_t>(skipped.size()));
  for (const uint32_t position : skipped) out.put(position);
}

Prepare Prepare::read(ByteReader& in) {
  Prepare prepare;
  prepare.ring = in.get_bool();
  for (uint32_t count = in.get_count(kMaxRoutes, 4); count > 0; --count) {
    const auto position = in.get<uint32_t>();
    if (!prepare.skipped.empty() && position <= prepare.skipped.back())
      fail(ErrorCode::kInvalidArgument, "Prepare: skipped routes out of order at {}", position);
    prepare.skipped.push_back(position);
  }
  return prepare;
}

}  // namespace tessera
