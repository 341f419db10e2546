#include "tests/support/jobs.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/clock.h"
#include "base/fail.h"
#include "base/socket.h"
#include "bus/registration/records.h"
#include "peer/inspection.h"
#include "tessera/memory.h"
#include "tessera/store.h"

namespace tessera::test {

Side trainer(Rank rank, int world) {
  return {.job = "trainer",
          .peer = "inference",
          .rank = rank,
          .world = world,
          .layout = std::to_string(world) + ":S0",
          .sends = true};
}

Side inference(Rank rank, int world) {
  return {.job = "inference", .peer = "trainer", .rank = rank, .world = world, .layout = std::to_string(world) + ":S1"};
}

Side with_agent(Side side) {
  side.agent = "daemon";
  return side;
}

Side staged(Side side) {
  side.options.mode = Mode::kStaged;
  return side;
}

std::vector<float> local_tensor(const Side& side) {
  const Layout layout = Layout::parse(side.layout).bind(side.shape);
  return std::vector<float>(static_cast<size_t>(layout.owned(side.shape, side.rank).size()) + 1);
}

TensorSpec spec_of(const Side& side, float* tensor) {
  return {.name = side.name,
          .data = tensor,
          .dtype = side.dtype,
          .shape = side.shape,
          .layout = Layout::parse(side.layout),
          .wire = side.wire};
}

Batch register_tensor(Pair& pair, const Side& side, float* tensor) {
  const TensorSpec spec = spec_of(side, tensor);
  return side.sends ? pair.offer("policy", {&spec, 1}, side.rendezvous, side.options)
                    : pair.accept("policy", {&spec, 1}, side.rendezvous, side.options);
}

Batch gather_and_register(Pair& pair, const Side& side, float* tensor) {
  if (!side.says.empty()) {
    std::vector<std::string> all;
    for (Rank rank = 0; rank < side.world; ++rank) all.push_back(side.says + std::to_string(rank));
    if (pair.all_gather("policy", all[static_cast<size_t>(side.rank)], side.rendezvous) != all)
      fail(ErrorCode::kInternal, "own ranks have told something else"_message);
  }
  return register_tensor(pair, side, tensor);
}

namespace {

float value_of(int64_t version, Index i) {
  return static_cast<float>(version * 10'000 + i);
}

// Every element that a side holds, by its index in the tensor, row-major.
template <typename Element, typename Visit>
void for_each_element(const Side& side, std::span<Element> tensor, Visit visit) {
  const Layout layout = Layout::parse(side.layout).bind(side.shape);
  const Region owned = layout.owned(side.shape, side.rank);
  size_t at = 0;
  for (const Interval& rows : owned.dim(0).intervals())
    for (Index row = rows.begin; row < rows.end; ++row)
      for (const Interval& columns : owned.dim(1).intervals())
        for (Index column = columns.begin; column < columns.end; ++column)
          visit(tensor[at++], row * side.shape[1] + column);
}

}  // namespace

void fill(const Side& side, std::span<float> tensor, int64_t version) {
  for_each_element(side, tensor, [&](float& element, Index i) { element = value_of(version, i); });
}

bool holds(const Side& side, std::span<const float> tensor, int64_t version) {
  bool all = true;
  for_each_element(side, tensor, [&](const float& element, Index i) { all = all && element == value_of(version, i); });
  return all;
}

int send_once(Batch& batch, std::vector<float>&) {
  batch.send().wait();
  return 0;
}

int receive_once(Batch& batch, std::vector<float>&) {
  batch.recv().wait();
  return 0;
}

bool fails_with(const std::function<void()>& call, ErrorCode code, const std::string& text) {
  try {
    call();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.code() == code && std::string_view(error.what()).find(text) != std::string_view::npos;
  }
  std::fprintf(stderr, "it went well\n");
  return false;
}

bool a_stop_ends_a_wait_for(Handle& handle) {
  std::stop_source stop;
  const std::jthread asks([&] { stop.request_stop(); });
  const bool ended = handle.wait_for(std::chrono::hours(1), stop.get_token()) ||
                     handle.wait_for(std::chrono::hours(1), stop.get_token());
  return !ended && !handle.wait_for(std::chrono::milliseconds(1));
}

void await_end(pid_t pid) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return;  // reaped
  pollfd wanted{.fd = process.get(), .events = POLLIN, .revents = 0};
  ::poll(&wanted, 1, Deadline::after(hang_limit()).poll_ms());
}

void stop_process(pid_t pid) {
  ::kill(pid, SIGSTOP);
  const auto stands = [](const std::filesystem::directory_entry& thread) {
    std::string line;
    std::getline(std::ifstream(thread.path() / "stat"), line);
    return line.find(") T ") != std::string::npos;
  };
  const std::filesystem::directory_iterator none;
  const Deadline deadline = Deadline::after(hang_limit());
  for (bool all = false; !all && !deadline.passed(); std::this_thread::yield())
    all = std::all_of(std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task"), none, stands);
}

bool went_well(const std::function<void()>& transfer) {
  try {
    transfer();
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeadlineExceeded) return false;
    throw;
  }
}

Report report_of(const std::string& store, const std::string& job, Rank rank) {
  const std::unique_ptr<Store> client = open_store(store);
  const std::string key = bus::rank_key("default", job, rank);
  const std::optional<KeyValue> record = client->get(key);
  if (!record) fail(ErrorCode::kNotFound, "no {}"_message, key);
  const Deadline deadline = Deadline::after(hang_limit());
  return Inspection(bus::read_record<bus::RankRecord>(key, record->value).address, deadline).answer(deadline);
}

int with_pair(const Side& side, const std::string& store, const std::function<int(Pair& pair)>& body) {
  Bus bus({.job = side.job,
           .rank = side.rank,
           .world = side.world,
           .store = store,
           .name_space = side.name_space,
           .agent = side.agent,
           .threads = 1,
           .digest = side.digest});
  Pair pair = bus.pair({.name = "weights",
                        .peer = side.peers.empty() ? side.peer : "",
                        .peers = side.peers,
                        .timeout = side.rendezvous});
  return body(pair);
}

int with_batch(const Side& side, const std::string& store,
               const std::function<int(Batch& batch, std::vector<float>& tensor)>& body) {
  return with_pair(side, store, [&](Pair& pair) {
    std::vector<float> tensor = local_tensor(side);
    Batch batch = gather_and_register(pair, side, tensor.data());
    return body(batch, tensor);
  });
}

int with_shared_batch(const Side& side, const std::string& store,
                      const std::function<int(Batch& batch, std::span<float> tensor)>& body) {
  return with_pair(side, store, [&](Pair& pair) {
    const size_t elements = local_tensor(side).size();
    const SharedBuffer memory = SharedHeap::process().allocate(elements * sizeof(float));
    auto* tensor = reinterpret_cast<float*>(memory.data());
    Batch batch = register_tensor(pair, side, tensor);
    return body(batch, {tensor, elements});
  });
}

void expect_all_well(ProcessGroup& group) {
  for (const Outcome& outcome : group.wait(2 * hang_limit()))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  EXPECT_THAT(group.left_over(), testing::Each(testing::Not(testing::StartsWith("p-"))));
}

// Nobody ever writes: the pipe ends once the last process has closed it.
Barrier::Barrier() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("pipe2");
  read_end_ = UniqueFd(ends[0]);
  write_end_ = UniqueFd(ends[1]);
  read_end_.keep_across_fork();
  write_end_.keep_across_fork();
}

void Barrier::pass() {
  write_end_.reset();
  if (!wait_ready(read_end_.get(), POLLIN, Deadline::after(hang_limit())))
    fail(ErrorCode::kDeadlineExceeded, "barrier: not all have come"_message);
}

Signal::Signal() : event_(::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {
  if (!event_) fail_errno("eventfd");
  event_.keep_across_fork();
}

void Signal::raise() const {
  ::eventfd_write(event_.get(), 1);
}

void Signal::wait() const {
  if (!wait_ready(event_.get(), POLLIN, Deadline::after(hang_limit())))
    fail(ErrorCode::kDeadlineExceeded, "no signal came"_message);
  eventfd_t taken = 0;
  ::eventfd_read(event_.get(), &taken);
}

}  // namespace tessera::test
