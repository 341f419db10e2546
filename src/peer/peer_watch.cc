#include "peer/peer_watch.h"

#include <sys/epoll.h>

#include <utility>

#include "base/mutex.h"
#include "peer/stop_detector.h"

namespace tessera {

// Shared by the loop, while it watches, and the owner.
struct PeerWatch::State : std::enable_shared_from_this<State> {
  State(EventLoop& on, std::vector<Peer> watched, std::function<void()> told)
      : loop(on), peers(std::move(watched)), detectors(peers.size()), changed(std::move(told)), stopped(peers.size()) {}

  // On the loop's thread.
  void begin();
  void look();
  void end();

  void tell() {
    const MutexLock lock(mutex);
    if (changed) changed();
  }

  EventLoop& loop;
  const std::vector<Peer> peers;
  std::vector<UniqueFd> pidfds;
  std::vector<StopDetector> detectors;
  EventLoop::TimerId timer = 0;

  Mutex mutex;  // held while `changed` runs
  std::function<void()> changed GUARDED_BY(mutex);
  std::vector<Status> stopped GUARDED_BY(mutex);
};

void PeerWatch::State::begin() {
  bool ended = false;
  for (const Peer& peer : peers) {
    UniqueFd pidfd = open_pidfd(peer.process);
    if (!pidfd) {
      ended = ended || liveness_of(peer.process) == Liveness::kDead;
      continue;
    }
    loop.add_fd(pidfd.get(), EPOLLIN, [self = shared_from_this(), fd = pidfd.get()](uint32_t) {
      self->loop.remove_fd(fd);
      self->tell();
    });
    pidfds.push_back(std::move(pidfd));
  }
  if (ended) tell();
  look();
}

void PeerWatch::State::look() {
  bool some = false;
  for (size_t p = 0; p < peers.size(); ++p) {
    Status status = detectors[p].look(peers[p].name, peers[p].process, peers[p].worker);
    const MutexLock lock(mutex);
    some = some || (!status.ok() && stopped[p].ok());
    stopped[p] = std::move(status);
  }
  if (some) tell();
  timer = loop.add_timer_after(kStopPeriod, [self = shared_from_this()] { self->look(); });
}

void PeerWatch::State::end() {
  loop.cancel_timer(timer);
  for (const UniqueFd& pidfd : pidfds) loop.remove_fd(pidfd.get());
  pidfds.clear();
}

PeerWatch::PeerWatch(EventLoop& loop, std::vector<Peer> peers, std::function<void()> changed)
    : state_(std::make_shared<State>(loop, std::move(peers), std::move(changed))) {
  loop.post([state = state_] { state->begin(); });
}

PeerWatch::~PeerWatch() {
  {
    const MutexLock lock(state_->mutex);
    state_->changed = nullptr;
  }
  state_->loop.post([state = state_] { state->end(); });
}

Status PeerWatch::stopped(size_t peer) const {
  const MutexLock lock(state_->mutex);
  return state_->stopped[peer];
}

}  // namespace tessera
