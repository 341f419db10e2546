#include "etp/schedule/buffer_key.h"

#include "base/fail.h"

namespace tessera::etp {

int64_t BufferKey::bytes() const {
  if (decoded) return bytes_of(*decoded, rows * columns);
  if (!format.quantised()) return bytes_of(format.dtype(), rows * columns);
  const bool column = plane == Plane::kColumn;
  return quantized_layout(format.spec(), {.row = !column, .column = column}, 1, rows, columns).bytes;
}

BufferKey gather_key(int64_t padded_rows, int64_t columns, const WeightFormat& format, Plane used,
                     std::optional<DType> decoded) {
  BufferKey key{.rows = padded_rows, .columns = columns, .format = format};
  if (format.quantised()) key.plane = format.gathered(used);
  if (decoded && !(format == WeightFormat(*decoded))) key.decoded = decoded;
  return key;
}

std::string to_string(const BufferKey& key) {
  std::string text = fmt::format("{} {}x{} {}", key.use == BufferUse::kGather ? "gather" : "reduce", key.rows,
                                 key.columns, to_string(key.format));
  if (key.plane) text += fmt::format(" {}", to_string(*key.plane));
  if (key.decoded) text += fmt::format(" as {}", to_string(*key.decoded));
  if (key.expert >= 0) text += fmt::format(", expert {}", key.expert);
  return text + fmt::format(", {}, group {}", to_string(key.chain), key.group);
}

}  // namespace tessera::etp

size_t std::hash<tessera::etp::BufferKey>::operator()(const tessera::etp::BufferKey& key) const noexcept {
  size_t bits = 0;
  const auto mix = [&bits](uint64_t value) { bits = (bits ^ value) * 0x9E3779B97F4A7C15 ^ (bits >> 29); };
  mix(static_cast<uint64_t>(key.rows));
  mix(static_cast<uint64_t>(key.columns));
  mix(key.format.quantised() ? 64 + static_cast<uint64_t>(key.format.format())
                             : static_cast<uint64_t>(key.format.dtype()));
  mix(key.plane ? 1 + static_cast<uint64_t>(*key.plane) : 0);
  mix(key.decoded ? 1 + static_cast<uint64_t>(*key.decoded) : 0);
  mix(static_cast<uint64_t>(key.use) << 1 | static_cast<uint64_t>(key.chain));
  mix(static_cast<uint64_t>(key.expert));
  mix(key.group);
  return bits;
}
