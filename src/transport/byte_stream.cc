#include "transport/byte_stream.h"

#include "base/socket.h"

namespace tessera {

StreamEnd StreamEnd::duplicate() const {
  StreamEnd copy{.transport = transport};
  for (const UniqueFd& fd : fds) copy.fds.push_back(duplicate_fd(fd.get()));
  return copy;
}

}  // namespace tessera
