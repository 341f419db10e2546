#include "checkpoint/safetensors_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <vector>

#include "base/fail.h"
#include "checkpoint/shown.h"
#include "checkpoint/strided_read.h"
#include "codec/simd/digest.h"

namespace tessera::checkpoint {

UniqueFd open_regular_file(const std::filesystem::path& path, int64_t& size) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO must not block us
  if (!fd) fail_errno(fmt::format("cannot open {}", path.string()));
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) fail_errno(fmt::format("cannot stat {}", path.string()));
  if (!S_ISREG(status.st_mode)) fail(ErrorCode::kInvalidArgument, "{}: not a regular file"_message, path.string());
  size = status.st_size;
  return fd;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path.string()) {
  int64_t size = 0;
  fd_ = open_regular_file(path, size);
  uint64_t header_bytes = 0;
  if (size < static_cast<int64_t>(sizeof(header_bytes)))
    fail(ErrorCode::kInvalidArgument,
         "{}: not a safetensors file: {} bytes, shorter than its length field of 8"_message, path_, size);
  read_exactly(fd_.get(), 0, std::as_writable_bytes(std::span(&header_bytes, 1)), path_);
  if (header_bytes > kMaxHeaderBytes)
    fail(ErrorCode::kInvalidArgument,
         "{}: a header of {} bytes, more than the limit of {}: not a safetensors file?"_message, path_, header_bytes,
         kMaxHeaderBytes);
  data_offset_ = static_cast<int64_t>(sizeof(header_bytes) + header_bytes);
  if (data_offset_ > size)
    fail(ErrorCode::kInvalidArgument, "{}: a header of {} bytes in a file of {}: is it truncated?"_message, path_,
         header_bytes, size);
  std::string json(header_bytes, '\0');
  read_exactly(fd_.get(), sizeof(header_bytes), std::as_writable_bytes(std::span(json)), path_);
  header_ = parse_header(json, size - data_offset_, path_);
}

void SafetensorsFile::read(const HeaderEntry& entry, const Region& region, std::span<std::byte> dst) const {
  const FileTensor tensor{fd_.get(), data_offset_ + entry.begin, entry.info.dtype, entry.info.shape};
  read_region(tensor, region, dst, fmt::format("{}: tensor {}", path_, shown(entry.info.name)));
}

std::string SafetensorsFile::checksum(const HeaderEntry& entry) const {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<std::byte> piece(static_cast<size_t>(std::min(kPiece, entry.end - entry.begin)));
  Digest digest;
  for (int64_t at = entry.begin; at < entry.end; at += kPiece) {
    const auto bytes = std::span(piece).first(static_cast<size_t>(std::min(kPiece, entry.end - at)));
    read_exactly(fd_.get(), data_offset_ + at, bytes, path_);
    digest_bytes(digest, static_cast<uint64_t>(at - entry.begin), bytes.data(), bytes.size());
  }
  return digest.to_string();
}

}  // namespace tessera::checkpoint
