#include "transport/remote_key.h"

#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/socket.h"

namespace tessera {

RemoteKey RemoteKey::duplicate() const {
  RemoteKey copy{.transport = transport, .device = device, .bytes = bytes, .fds = {}};
  for (const UniqueFd& fd : fds) copy.fds.push_back(duplicate_fd(fd.get()));
  return copy;
}

std::vector<UniqueFd> detach_fds(std::span<RemoteKey> keys) {
  std::vector<UniqueFd> fds;
  for (RemoteKey& key : keys)
    for (UniqueFd& fd : key.fds) fds.push_back(std::move(fd));
  return fds;
}

void attach_fds(std::span<RemoteKey> keys, std::vector<UniqueFd> fds) {
  size_t wanted = 0;
  for (const RemoteKey& key : keys) wanted += key.fds.size();
  if (wanted != fds.size())
    fail(ErrorCode::kMismatch, "{} keys with {} descriptors, they have {}"_message, keys.size(), fds.size(), wanted);
  auto next = fds.begin();
  for (RemoteKey& key : keys)
    for (UniqueFd& fd : key.fds) fd = std::move(*next++);
}

std::vector<std::vector<RemoteKey>> split_by_fds(std::vector<RemoteKey> keys) {
  std::vector<std::vector<RemoteKey>> parts(1);
  size_t fds = 0;  // of the last part
  for (RemoteKey& key : keys) {
    if (fds + key.fds.size() > kMaxFdsPerMessage) {
      parts.emplace_back();
      fds = 0;
    }
    fds += key.fds.size();
    parts.back().push_back(std::move(key));
  }
  return parts;
}

}  // namespace tessera
