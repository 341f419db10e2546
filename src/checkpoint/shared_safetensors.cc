#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/fail.h"
#include "base/fd.h"
#include "checkpoint/file_writes.h"
#include "checkpoint/region_checks.h"
#include "checkpoint/region_runs.h"
#include "checkpoint/safetensors_plan.h"
#include "checkpoint/shown.h"
#include "checkpoint/strided_read.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace fs = std::filesystem;

struct SharedSafetensors::Impl {
  std::string path;
  checkpoint::FilePlan plan;
  std::unordered_map<std::string_view, size_t> ids;  // by name; views into `plan`
  UniqueFd fd;

  Impl(const fs::path& given, std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata)
      : path(given.string()), plan(checkpoint::plan_file(tensors, metadata, path)) {
    for (size_t i = 0; i < plan.tensors.size(); ++i) ids.emplace(plan.tensors[i].name, i);
  }

  checkpoint::Written written() const { return {fd.get(), path, plan.bytes}; }
  void open(int flags) {
    constexpr mode_t kMode = 0666;  // minus the umask
    fd.reset(::open(path.c_str(), flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, kMode));
    if (!fd) fail_errno(fmt::format("{}: cannot open it for writing", path));
  }
  void require_created() const {
    struct stat status{};
    if (::fstat(fd.get(), &status) != 0) fail_errno(fmt::format("cannot stat {}", path));
    std::string head(plan.head.size(), '\0');
    const bool fits = S_ISREG(status.st_mode) && status.st_size == plan.bytes;
    if (fits) checkpoint::read_exactly(fd.get(), 0, std::as_writable_bytes(std::span(head)), path);
    if (!fits || head != plan.head)
      fail(ErrorCode::kMismatch, "{}: it was created for other tensors: all processes write the same ones"_message,
           path);
  }
};

SharedSafetensors::SharedSafetensors(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedSafetensors::SharedSafetensors(SharedSafetensors&&) noexcept = default;
SharedSafetensors& SharedSafetensors::operator=(SharedSafetensors&&) noexcept = default;
SharedSafetensors::~SharedSafetensors() = default;

SharedSafetensors SharedSafetensors::create(const fs::path& path, std::span<const TensorInfo> tensors,
                                            const std::map<std::string, std::string>& metadata) {
  auto impl = std::make_unique<Impl>(path, tensors, metadata);
  impl->open(O_CREAT | O_EXCL);
  try {
    checkpoint::reserve(impl->written());
    if (::ftruncate(impl->fd.get(), impl->plan.bytes) != 0) checkpoint::fail_write(impl->written(), errno);
    checkpoint::write_exactly(impl->written(), 0, std::as_bytes(std::span(impl->plan.head)));
  } catch (...) {
    ::unlink(impl->path.c_str());
    throw;
  }
  return SharedSafetensors(std::move(impl));
}

SharedSafetensors SharedSafetensors::open(const fs::path& path, std::span<const TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata) {
  auto impl = std::make_unique<Impl>(path, tensors, metadata);
  impl->open(0);
  impl->require_created();
  return SharedSafetensors(std::move(impl));
}

int64_t SharedSafetensors::bytes() const {
  return impl_->plan.bytes;
}

void SharedSafetensors::write_slice(std::string_view name, const Region& region, std::span<const std::byte> src) const {
  const auto found = impl_->ids.find(name);
  if (found == impl_->ids.end())
    fail(ErrorCode::kNotFound, "{}: it has no tensor {}"_message, impl_->path, checkpoint::shown(name));
  const TensorInfo& info = impl_->plan.tensors[found->second];
  const std::string where = fmt::format("{}: tensor {}", impl_->path, checkpoint::shown(name));
  checkpoint::require_inside(info, region, where);
  TESSERA_CHECK_EQ(static_cast<int64_t>(src.size()), bytes_of(info.dtype, region.size()));
  const int64_t offset = impl_->plan.offsets[found->second];
  checkpoint::for_each_byte_run(info.dtype, info.shape, region, where, [&](int64_t begin, int64_t bytes) {
    checkpoint::write_exactly(impl_->written(), offset + begin, src.first(static_cast<size_t>(bytes)));
    src = src.subspan(static_cast<size_t>(bytes));
  });
}

void SharedSafetensors::sync() const {
  checkpoint::sync(impl_->written());
}

std::vector<int> spread_over_files(std::span<const TensorInfo> tensors, int files) {
  TESSERA_CHECK_LE(1, files);
  std::vector<int64_t> bytes;
  for (const TensorInfo& tensor : tensors) bytes.push_back(bytes_of(tensor.dtype, element_count(tensor.shape)));
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, [&](size_t a, size_t b) {
    return std::tuple(-bytes[a], std::string_view(tensors[a].name)) <
           std::tuple(-bytes[b], std::string_view(tensors[b].name));
  });
  std::vector<int64_t> filled(static_cast<size_t>(files));
  std::vector<int> file(tensors.size());
  for (const size_t i : order) {
    const auto least = std::ranges::min_element(filled);
    file[i] = static_cast<int>(least - filled.begin());
    *least += bytes[i];
  }
  return file;
}

}  // namespace tessera
