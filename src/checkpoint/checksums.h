// Checksums of tensors that files note: digests (docs/formats/digest.md) of the tensors as they lie in the files.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

// Key of a file's `__metadata__` whose value is a JSON text {"name": "32 hex digits"}.
inline constexpr std::string_view kChecksumsKey = "tessera.checksums";

using Checksums = std::map<std::string, std::string>;  // by tensor, 32 hex digits each

// Returns the checksum of a tensor whose elements lie packed row-major.
std::string checksum_of(std::span<const std::byte> packed);

// Parses the value of kChecksumsKey. `path` is for messages. Throws Error(kInvalidArgument) for anything else than what
// format_checksums() writes.
Checksums parse_checksums(std::string_view json, std::string_view path);
// Parses those of an index, which are its metadata.tessera.checksums; none are no error. REQUIRES: parse_index() has
// taken the text, which limits its depth.
Checksums parse_index_checksums(std::string_view json, std::string_view path);

// REQUIRES: names are UTF-8; what is not is replaced.
std::string format_checksums(const Checksums& checksums);

}  // namespace tessera::checkpoint
