#include "tessera/checkpoint.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/fail.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checksums.h"
#include "checkpoint/region_checks.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/shown.h"

namespace tessera {
namespace fs = std::filesystem;

struct Checkpoint::Impl {
  struct Place {
    size_t file;
    const checkpoint::HeaderEntry* entry;
  };

  fs::path path;
  std::vector<checkpoint::SafetensorsFile> files;
  std::vector<TensorInfo> tensors;
  std::vector<Place> places;                         // of each tensor
  std::unordered_map<std::string_view, size_t> ids;  // by name; views into `tensors`
  int64_t bytes = 0;
  checkpoint::Checksums checksums;

  // Takes the tensors for which take(file, name) holds.
  template <typename Take>
  void collect(Take take) {
    for (size_t f = 0; f < files.size(); ++f)
      for (const checkpoint::HeaderEntry& entry : files[f].header().tensors)
        if (take(f, entry.info.name)) {
          tensors.push_back(entry.info);
          places.push_back({f, &entry});
          bytes += entry.end - entry.begin;
        }
    for (size_t i = 0; i < tensors.size(); ++i) ids.emplace(tensors[i].name, i);
  }

  const Place& place_of(std::string_view name) const {
    const auto id = ids.find(name);
    if (id == ids.end())
      fail(ErrorCode::kNotFound, "{}: it has no tensor {}"_message, path.string(), checkpoint::shown(name));
    return places[id->second];
  }
};

namespace {

constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";

// The only index of a folder or, without an index, its only safetensors file.
fs::path find_in_folder(const fs::path& folder) {
  std::vector<fs::path> files;
  std::vector<fs::path> indexes;
  std::error_code error;
  for (auto it = fs::directory_iterator(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(kIndexSuffix)) indexes.push_back(it->path());
    if (name.ends_with(kFileSuffix)) files.push_back(it->path());
  }
  if (error) fail_errno(fmt::format("cannot read folder {}", folder.string()), error.value());
  const auto& candidates = indexes.empty() ? files : indexes;
  if (candidates.empty())
    fail(ErrorCode::kNotFound, "{}: the folder holds no *{} and no *{}"_message, folder.string(), kIndexSuffix,
         kFileSuffix);
  if (candidates.size() > 1)
    fail(ErrorCode::kInvalidArgument, "{}: the folder holds {} of *{}: name one of them"_message, folder.string(),
         candidates.size(), indexes.empty() ? kFileSuffix : kIndexSuffix);
  return candidates.front();
}

}  // namespace

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const fs::path& given) {
  std::error_code ignored;
  const fs::path path = fs::is_directory(given, ignored) ? find_in_folder(given) : given;
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  if (!path.filename().string().ends_with(".json")) {
    impl->files.emplace_back(path);
    impl->collect([](size_t, const std::string&) { return true; });
    const auto& metadata = impl->files.front().header().metadata;
    if (const auto noted = metadata.find(std::string(checkpoint::kChecksumsKey)); noted != metadata.end())
      impl->checksums = checkpoint::parse_checksums(noted->second, path.string());
    return Checkpoint(std::move(impl));
  }

  const std::string index = checkpoint::read_index(path);
  const checkpoint::WeightMap weights = checkpoint::parse_index(index, path.string());
  impl->checksums = checkpoint::parse_index_checksums(index, path.string());
  std::vector<const std::set<std::string>*> wanted;
  for (const auto& [file, names] : weights) {
    impl->files.emplace_back(path.parent_path() / file);
    wanted.push_back(&names);
  }
  impl->collect([&](size_t file, const std::string& name) { return wanted[file]->contains(name); });
  for (const auto& [file, names] : weights)
    for (const std::string& name : names)
      if (!impl->ids.contains(name))
        fail(ErrorCode::kInvalidArgument, "{}: tensor {} is not in {}, where the index says it is"_message,
             path.string(), checkpoint::shown(name), file);
  return Checkpoint(std::move(impl));
}

const fs::path& Checkpoint::path() const {
  return impl_->path;
}
std::span<const TensorInfo> Checkpoint::tensors() const {
  return impl_->tensors;
}
int64_t Checkpoint::bytes() const {
  return impl_->bytes;
}

const std::map<std::string, std::string>& Checkpoint::metadata() const {
  static const std::map<std::string, std::string> kNone;
  return impl_->files.empty() ? kNone : impl_->files.front().header().metadata;
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  const auto found = impl_->ids.find(name);
  return found == impl_->ids.end() ? nullptr : &impl_->tensors[found->second];
}

void Checkpoint::read_slice(std::string_view name, const Region& region, std::span<std::byte> dst) const {
  const Impl::Place& place = impl_->place_of(name);
  const TensorInfo& info = place.entry->info;
  checkpoint::require_inside(info, region, fmt::format("{}: tensor {}", path().string(), checkpoint::shown(name)));
  TESSERA_CHECK_EQ(static_cast<int64_t>(dst.size()), bytes_of(info.dtype, region.size()));
  impl_->files[place.file].read(*place.entry, region, dst);
}

const std::map<std::string, std::string>& Checkpoint::checksums() const {
  return impl_->checksums;
}

void Checkpoint::verify(std::string_view name) const {
  const Impl::Place& place = impl_->place_of(name);
  const auto saved = impl_->checksums.find(std::string(name));
  if (saved == impl_->checksums.end()) return;
  const checkpoint::SafetensorsFile& file = impl_->files[place.file];
  if (const std::string checksum = file.checksum(*place.entry); checksum != saved->second)
    fail(
        ErrorCode::kDataLoss,
        "{}: tensor {} is damaged: its checksum is {}, and was {} when it was saved: copy the file again, or take another checkpoint"_message,
        file.path(), checkpoint::shown(name), checksum, saved->second);
}

}  // namespace tessera
