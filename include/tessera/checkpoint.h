// Checkpoints in the safetensors format (https://github.com/huggingface/safetensors): reading slices of them, writing
// files of local tensors, and comparing the two. See docs/formats/checkpoint-files.md.
//
// Sizes are in elements unless a name says bytes. Tensors are row-major; F4 packs two elements a byte and shapes count
// elements. A file is untrusted input: every length, offset and name is checked when it is opened, and nothing is
// allocated before its size has been. Errors name the file, the tensor and the value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {

// What a checkpoint, or a sender, says about one tensor.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;  // global
  bool operator==(const TensorInfo&) const = default;
};

// A checkpoint opened for reading: one `.safetensors` file, the files of a `*.safetensors.index.json`, or a folder that
// holds exactly one of either. Move-only; const calls are thread-safe. Files are read with pread, never mapped: one
// that is truncated while open is an error of that read, not a SIGBUS.
class Checkpoint {
 public:
  // Reads and checks the headers. Throws Error(kNotFound) where there is no such file, Error(kInvalidArgument) for one
  // that is not a well-formed checkpoint.
  static Checkpoint open(const std::filesystem::path& path);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::filesystem::path& path() const;
  // In the order of their bytes, file by file.
  std::span<const TensorInfo> tensors() const;
  // nullptr if there is none of that name. Points into tensors().
  const TensorInfo* find(std::string_view name) const;
  // `__metadata__` of the file; of an index, that of its first file.
  const std::map<std::string, std::string>& metadata() const;
  int64_t bytes() const;  // of all tensors

  // Reads the elements of `region` (global coordinates) into `dst`, packed row-major: the local tensor of a rank that
  // owns `region`. REQUIRES: dst holds exactly bytes_of(dtype, region.size()) bytes.
  // Throws Error(kNotFound) for an unknown name and Error(kInvalidArgument) for a region outside the shape, for one
  // that cuts an F4 tensor inside a byte, and for a file that has been truncated since open().
  void read_slice(std::string_view name, const Region& region, std::span<std::byte> dst) const;

  // Checksums of tensors as they lie in the files, 32 hex digits by name, which tessera.checkpoint.save() and `tessera
  // recv --out` note (docs/formats/checkpoint-files.md); empty for files of other programs.
  const std::map<std::string, std::string>& checksums() const;
  // Reads a tensor whole, in pieces, and compares it with its checksum; does nothing if it has none. Throws as
  // read_slice() does, and Error(kDataLoss), which names file and tensor.
  void verify(std::string_view name) const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One tensor to be written: contiguous row-major memory of bytes_of(dtype, element_count(shape)) bytes. Owns nothing.
struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  const std::byte* data = nullptr;  // may be null where there are no elements
};

// Writes a `.safetensors` file so that `path` holds either what it held before or the whole new file, whatever happens:
// the bytes go to an unnamed file (O_TMPFILE) of the same folder, which is linked when they are complete and on disk.
// Tensors are laid out as the reference implementation does, by dtype, the widest first, then by name. Returns the
// file's size. Throws Error(kResourceExhausted) that names path and bytes when the disk is full,
// Error(kInvalidArgument) for two tensors of one name or an odd number of F4 elements.
int64_t write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                          const std::map<std::string, std::string>& metadata = {});

// A `.safetensors` file that several processes write at the same time, each its own slices: no process needs a tensor
// whole. Every process gives the same tensors and metadata, from which all places follow (the order is that of
// write_safetensors()). The file is complete once every element has been written; giving it the name that readers know
// after that is the caller's part. Move-only; const calls are thread-safe.
class SharedSafetensors {
 public:
  // For one of the processes: makes the file, which must not exist, reserves its whole size and writes the header; on
  // an error it is removed. Throws as write_safetensors() does, and Error(kAlreadyExists).
  static SharedSafetensors create(const std::filesystem::path& path, std::span<const TensorInfo> tensors,
                                  const std::map<std::string, std::string>& metadata = {});
  // For the others, once it has been made. Throws Error(kNotFound), and Error(kMismatch) if it was made for other
  // tensors or metadata.
  static SharedSafetensors open(const std::filesystem::path& path, std::span<const TensorInfo> tensors,
                                const std::map<std::string, std::string>& metadata = {});
  SharedSafetensors(SharedSafetensors&&) noexcept;
  SharedSafetensors& operator=(SharedSafetensors&&) noexcept;
  ~SharedSafetensors();

  int64_t bytes() const;  // of the whole file

  // Writes the elements of `region` (global coordinates) from `src`, packed row-major: the mirror of read_slice().
  // Elements that are contiguous in the file are one system call. REQUIRES: src holds exactly
  // bytes_of(dtype, region.size()) bytes. Throws as read_slice() does, and Error(kResourceExhausted).
  void write_slice(std::string_view name, const Region& region, std::span<const std::byte> src) const;

  // Waits until what this process has written is on the disk.
  void sync() const;

 private:
  struct Impl;
  explicit SharedSafetensors(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Which of `files` files each tensor goes to, so that they have about equal bytes: a pure function, so that processes
// that agree on the list agree on the files. REQUIRES: files >= 1.
std::vector<int> spread_over_files(std::span<const TensorInfo> tensors, int files);

// Where two local tensors differ first.
struct Difference {
  std::vector<Index> index;  // global
  std::string expected;      // "0.5 (0x3f000000)"
  std::string actual;
  int64_t elements = 0;           // how many differ in all
  std::string to_string() const;  // "[3,17] is 0.25 (0x3e800000), expected 0.5 (0x3f000000); 12 elements differ"
};

// Compares, bit for bit, two packed local tensors that hold `region` of a global tensor; none where they are equal.
// REQUIRES: both spans hold bytes_of(dtype, region.size()) bytes.
std::optional<Difference> first_difference(DType dtype, const Region& region, std::span<const std::byte> expected,
                                           std::span<const std::byte> actual);

// One element as people read it, with its bits: "0.5 (0x3f000000)", "-3", "true". `element` counts from `data`.
std::string element_to_string(DType dtype, const std::byte* data, int64_t element);

}  // namespace tessera
