#include "collective/shared/shared_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "base/fail.h"
#include "base/mutex.h"

namespace tessera::collective {
namespace {

std::byte* map_pages(int fd, size_t bytes, int protection) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const data = ::mmap(nullptr, bytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) fail_errno(fmt::format("pages: mmap of {} bytes", bytes));
  ::madvise(data, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(data);
}

struct Registry {
  Mutex mutex;
  std::map<uint64_t, std::weak_ptr<SharedPages>> pages GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const registry = new Registry;  // never destroyed: groups may outlive statics
  return *registry;
}

}  // namespace

std::shared_ptr<SharedPages> SharedPages::create(size_t bytes, Writers writers) {
  UniqueFd fd(::memfd_create("tessera-page", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno("pages: memfd_create");
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)
    fail_errno(fmt::format("pages: fallocate of {} bytes", bytes));
  std::byte* const data = map_pages(fd.get(), bytes, PROT_READ | PROT_WRITE);
  std::shared_ptr<SharedPages> pages(new SharedPages(std::move(fd), data, bytes));
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (writers == Writers::kMaker ? F_SEAL_FUTURE_WRITE : 0);
  if (::fcntl(pages->fd(), F_ADD_SEALS, seals) != 0) fail_errno("pages: sealing");
  return pages;
}

std::shared_ptr<SharedPages> SharedPages::open(UniqueFd fd, size_t bytes, Writers writers, std::string_view owner) {
  // Reads the seal before the size: once the seal is there, the size cannot change.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  struct stat file{};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &file) != 0)
    fail(ErrorCode::kInvalidArgument, "pages of {}: the descriptor is not a memfd sealed against shrinking"_message,
         owner);
  if (static_cast<uint64_t>(file.st_size) < bytes)
    fail(ErrorCode::kInvalidArgument, "pages of {}: {} bytes instead of {}"_message, owner, file.st_size, bytes);
  const int protection = writers == Writers::kAll ? PROT_READ | PROT_WRITE : PROT_READ;
  std::byte* const data = map_pages(fd.get(), bytes, protection);
  return std::shared_ptr<SharedPages>(new SharedPages({}, data, bytes));
}

std::shared_ptr<SharedPages> SharedPages::create_in_process(size_t bytes, uint64_t key) {
  std::shared_ptr<SharedPages> pages(new SharedPages({}, map_pages(-1, bytes, PROT_READ | PROT_WRITE), bytes));
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  std::erase_if(all.pages, [](const auto& entry) { return entry.second.expired(); });
  if (!all.pages.emplace(key, pages).second) fail_internal("pages: key {:x} is taken", key);
  return pages;
}

std::shared_ptr<SharedPages> SharedPages::find(uint64_t key) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  const auto found = all.pages.find(key);
  return found == all.pages.end() ? nullptr : found->second.lock();
}

SharedPages::~SharedPages() {
  ::munmap(data_, bytes_);
}

}  // namespace tessera::collective
