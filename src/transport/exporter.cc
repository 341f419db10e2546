#include "transport/exporter.h"

namespace tessera {

Exporter::Exported Exporter::add(const LocalMemory& memory) {
  Endpoint src = self_;
  src.device = memory.device;
  const Transport& transport = memory.packed ? registry_.streaming(src, peer_) : registry_.choose(src, peer_);
  const Transport::Located located = transport.locate(memory);
  const auto number = static_cast<uint32_t>(numbers_.size());
  const auto [entry, first] = numbers_.try_emplace({&transport, located.region}, number);
  if (first) keys_.push_back(transport.export_region(memory));
  return {.range = {.key = entry->second, .offset = located.offset, .bytes = memory.bytes}, .caps = located.caps};
}

}  // namespace tessera
