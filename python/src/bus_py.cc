// Bus, Pair, Batch and Handle. Every call that may block releases the GIL and ends when a signal handler raises.
#include "base/mutex.h"
#include "tessera/bus.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/thread.h"
#include "bindings.h"
#include "peer/identity.h"
#include "waiting.h"

namespace tessera::python {
namespace {

// A shorter wait is not worth a thread.
constexpr Timeout kShortWait = std::chrono::milliseconds(1);
constexpr Duration kLook = std::chrono::milliseconds(10);
constexpr Duration kWaitsEnd = std::chrono::seconds(10);    // they end as soon as they look
constexpr Timeout kLongWait = std::chrono::hours(24 * 30);  // operations end at their own deadlines

Mode mode_from(const std::string& name) {
  if (name == "inplace") return Mode::kInPlace;
  if (name == "staged") return Mode::kStaged;
  fail(ErrorCode::kInvalidArgument, "mode {}: 'inplace' and 'staged' are possible"_message, in_quotes(name));
}

using Digests = std::variant<bool, std::string>;

DigestMode digest_from(const Digests& digest) {
  const auto* text = std::get_if<std::string>(&digest);
  return text != nullptr ? DigestMode::parse(*text) : DigestMode(std::get<bool>(digest));
}

// An interrupt ends the bus's current waits for other ranks (Bus::interrupt()), or its opening.
class PyBus {
 public:
  PyBus(std::string job, Rank rank, int world, std::string store, std::string name_space, std::string agent,
        int threads, const Digests& digest, std::optional<double> timeout, std::optional<double> stall,
        const std::stop_source* stop)
      : job_(job), world_(world), stop_(stop == nullptr ? std::stop_source() : *stop) {
    const BusOptions options{.job = std::move(job),
                             .rank = rank,
                             .world = world,
                             .store = std::move(store),
                             .name_space = std::move(name_space),
                             .agent = std::move(agent),
                             .threads = threads,
                             .digest = digest_from(digest),
                             .timeout = timeout_from("timeout", timeout, kRendezvousTimeout),
                             .stall = timeout_from("stall", stall, kTransferTimeout),
                             .stop = stop_.get_token()};
    wait([&] {
      auto opened = std::make_unique<Bus>(options);
      const MutexLock lock(mutex_);
      bus_ = std::move(opened);
    });
  }

  ~PyBus() { close(); }

  int world() const { return world_; }

  // Leaves once its pairs and batches have gone.
  void close() {
    const nb::gil_scoped_release released;  // it joins threads
    std::unique_ptr<Bus> closed;
    const MutexLock lock(mutex_);
    std::swap(closed, bus_);
  }

  // Makes a call that waits for other ranks.
  void wait(const std::function<void()>& call) {
    call_interruptibly(
        [&] {
          const Waiting waiting(*this);
          call();
        },
        [this] { interrupt(); });
  }
  // Ends these calls of all threads with kCancelled, and later ones.
  void end_waits() {
    const nb::gil_scoped_release released;
    if (::getpid() != process_) return;  // a forked child has not these threads
    const Deadline deadline = Deadline::after(kWaitsEnd);
    const MutexLock lock(mutex_);
    ended_ = true;
    while (waits_ > 0 && !deadline.passed()) {
      if (bus_) bus_->interrupt();
      changed_.wait_until(mutex_, Deadline::after(kLook));  // one may have begun to wait for something else
    }
    if (waits_ > 0)
      log_event(LogLevel::warn, "bus.unended", {{"job", job_}},
                "{} calls of other threads still wait, {:.0f} s after close() has asked them to end", waits_,
                to_seconds(kWaitsEnd));
  }
  void interrupt() {
    const MutexLock lock(mutex_);
    if (bus_)
      bus_->interrupt();
    else
      stop_.request_stop();  // not open yet, or closed
  }
  Bus& get() {
    const MutexLock lock(mutex_);
    if (!bus_) fail(ErrorCode::kInvalidArgument, "the bus is closed: connect() again"_message);
    return *bus_;
  }

 private:
  class Waiting {
   public:
    explicit Waiting(PyBus& bus) : bus_(bus) {
      const MutexLock lock(bus_.mutex_);
      if (bus_.ended_) fail(ErrorCode::kCancelled, "the bus was closed: connect() again"_message);
      ++bus_.waits_;
    }
    ~Waiting() {
      {
        const MutexLock lock(bus_.mutex_);
        --bus_.waits_;
      }
      bus_.changed_.notify_all();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    PyBus& bus_;
  };

  const std::string job_;
  const int world_;
  const pid_t process_ = ::getpid();
  std::stop_source stop_;
  Mutex mutex_;
  CondVar changed_;
  int waits_ GUARDED_BY(mutex_) = 0;
  bool ended_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<Bus> bus_ GUARDED_BY(mutex_);
};

using SharedBus = std::shared_ptr<PyBus>;

std::stop_token token_of(const std::stop_source* stop) {
  return stop == nullptr ? std::stop_token() : stop->get_token();
}

class PyHandle {
 public:
  explicit PyHandle(Handle handle) : handle_(std::move(handle)) {}

  // Returns the version or throws the operation's error; DeadlineExceeded if it has not ended after `timeout` seconds
  // (it goes on).
  int64_t wait(std::optional<double> timeout) {
    if (!wait_for(timeout)) {
      const Progress now = handle_.progress();
      fail(ErrorCode::kDeadlineExceeded, "the handle has not ended after {} s, at {} of {} bytes; it goes on"_message,
           *timeout, now.bytes_done, now.bytes_total);
    }
    return handle_.wait();
  }

  bool wait_for(std::optional<double> seconds) {
    const Timeout timeout = timeout_from("timeout", seconds, kLongWait);
    {
      const nb::gil_scoped_release released;
      if (handle_.wait_for(std::min(timeout, kShortWait))) return true;
    }
    if (timeout <= kShortWait) return false;
    bool ended = false;
    call_interruptibly([&](std::stop_token stop) { ended = handle_.wait_for(timeout - kShortWait, std::move(stop)); });
    return ended;
  }

  Handle& get() { return handle_; }

 private:
  Handle handle_;
};

// A descriptor that becomes readable once a handle has ended: for event loops.
class PyWaiter {
 public:
  // The handle outlives the waiter.
  explicit PyWaiter(PyHandle& handle) : ended_(::eventfd(0, EFD_CLOEXEC)) {
    if (!ended_) fail(ErrorCode::kResourceExhausted, "no descriptor is left to wait with (raise `ulimit -n`)"_message);
    thread_ = start_thread("tessera-await", [this, &handle] {
      handle.get().wait_for(kLongWait, stop_.get_token());
      ::eventfd_write(ended_.get(), 1);
    });
  }
  ~PyWaiter() { close(); }
  PyWaiter(const PyWaiter&) = delete;
  PyWaiter& operator=(const PyWaiter&) = delete;

  int fileno() const { return ended_.get(); }
  void close() {
    const nb::gil_scoped_release released;
    stop_.request_stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  const UniqueFd ended_;
  std::stop_source stop_;
  std::thread thread_;
};

class PyBatch {
 public:
  PyBatch(SharedBus bus, Batch batch) : bus_(std::move(bus)), batch_(std::move(batch)) {}

  ~PyBatch() {
    const nb::gil_scoped_release released;  // it may wait for a transfer
    batch_.reset();
  }

  Batch& get() { return *batch_; }
  PyBus& bus() { return *bus_; }

 private:
  const SharedBus bus_;
  std::optional<Batch> batch_;
};

class PyPair {
 public:
  PyPair(SharedBus bus, const std::string& name, const std::string& peer, std::optional<double> timeout,
         const std::optional<Layout>& layout, std::vector<std::string> peers)
      : bus_(std::move(bus)) {
    const PairOptions options{.name = name,
                              .peer = peer,
                              .peers = std::move(peers),
                              .timeout = timeout_from("timeout", timeout, kRendezvousTimeout),
                              .layout = layout.value_or(Layout())};
    bus_->wait([&] { pair_ = std::make_shared<Pair>(bus_->get().pair(options)); });
  }

  std::vector<ManifestEntry> manifest(const std::string& id, std::optional<double> timeout,
                                      const std::stop_source* stop) {
    const Timeout limit = timeout_from("timeout", timeout, kRendezvousTimeout);
    std::vector<ManifestEntry> entries;
    bus_->wait([&, pair = held()] { entries = pair->manifest(id, limit, token_of(stop)); });
    return entries;
  }

  ~PyPair() { close(); }

  // Leaves once its batches have gone.
  void close() {
    std::shared_ptr<Pair> closed = std::move(pair_);
    const nb::gil_scoped_release released;  // it may tell the others
    closed.reset();
  }

  nb::typed<nb::list, nb::str> all_gather(const std::string& id, const std::string& value,
                                          std::optional<double> timeout, const std::stop_source* stop) {
    const Timeout limit = timeout_from("timeout", timeout, kRendezvousTimeout);
    std::vector<std::string> values;
    bus_->wait([&, pair = held()] { values = pair->all_gather(id, value, limit, token_of(stop)); });
    nb::list texts;  // of other ranks, which may be any bytes
    for (const std::string& text : values) texts.append(str_of(text));
    return nb::typed<nb::list, nb::str>(texts);
  }

  void give_up(const std::string& id, const std::string& code, const std::string& text) {
    const Status why(error_code_named(code), text);
    bus_->wait([&, pair = held()] { pair->give_up(id, why); });
  }

  Pair& get() { return *held(); }

 private:
  // Outlives a close() by another thread.
  std::shared_ptr<Pair> held() const {
    if (!pair_) fail(ErrorCode::kInvalidArgument, "the pair is closed: connect() again"_message);
    return pair_;
  }

  const SharedBus bus_;
  std::shared_ptr<Pair> pair_;  // guarded by the GIL
};

// Calls a public function without the GIL.
template <typename Call>
auto released(Call&& call) {
  const nb::gil_scoped_release without;
  return std::forward<Call>(call)();
}

void bind_handle(nb::module_& module) {
  nb::class_<PyHandle>(module, "Handle")
      .def("wait", &PyHandle::wait, nb::arg("timeout") = nb::none())
      .def("wait_for", &PyHandle::wait_for, nb::arg("timeout") = nb::none())
      .def("done", [](PyHandle& self) { return released([&] { return self.get().done(); }); })
      .def("cancel", [](PyHandle& self) { return released([&] { return self.get().cancel(); }); })
      .def("withdraw",
           [](PyHandle& self) {
             bool withdrawn = false;
             call_interruptibly([&] { withdrawn = self.get().withdraw(); }, [] {});  // it takes 10 s at most
             return withdrawn;
           })
      .def("progress", [](PyHandle& self) { return released([&] { return self.get().progress(); }); })
      .def("version", [](PyHandle& self) { return released([&] { return self.get().version(); }); });
  nb::class_<PyWaiter>(module, "Waiter", "Has a descriptor that becomes readable once a handle has ended.")
      .def(nb::init<PyHandle&>(), nb::arg("handle"), nb::keep_alive<1, 2>())
      .def("fileno", &PyWaiter::fileno)
      .def("close", &PyWaiter::close);
}

void bind_batch(nb::module_& module) {
  const auto transfer = [](Handle (Batch::*call)(std::optional<int64_t>, Timeout)) {
    return [call](PyBatch& self, std::optional<int64_t> version, std::optional<double> timeout) {
      const Timeout limit = timeout_from("timeout", timeout, kTransferTimeout);
      return std::make_unique<PyHandle>(released([&] { return (self.get().*call)(version, limit); }));
    };
  };
  nb::class_<PyBatch>(module, "Batch")
      .def("send", transfer(&Batch::send), nb::arg("version") = nb::none(), nb::arg("timeout") = nb::none())
      .def("recv", transfer(&Batch::recv), nb::arg("min_version") = nb::none(), nb::arg("timeout") = nb::none())
      .def("stage", transfer(&Batch::stage), nb::arg("min_version") = nb::none(), nb::arg("timeout") = nb::none())
      .def("commit", [](PyBatch& self) { return released([&] { return self.get().commit(); }); })
      .def(
          "relocate",
          [](PyBatch& self, const std::vector<TensorSpec>& tensors) {
            released([&] { self.get().relocate(tensors); });
          },
          nb::arg("tensors"))
      .def("version", [](PyBatch& self) { return self.get().version(); })
      .def("newest", [](PyBatch& self) { return released([&] { return self.get().newest(); }); })
      .def(
          "wait_version",
          [](PyBatch& self, int64_t version, std::optional<double> timeout) {
            const Timeout limit = timeout_from("timeout", timeout, kTransferTimeout);
            int64_t newest = 0;
            self.bus().wait([&] { newest = self.get().wait_version(version, limit); });
            return newest;
          },
          nb::arg("version"), nb::arg("timeout") = nb::none())
      .def("peers", [](PyBatch& self) { return released([&] { return self.get().peers(); }); })
      .def(
          "wait_peers",
          [](PyBatch& self, int jobs, int64_t version, std::optional<double> timeout) {
            const Timeout limit = timeout_from("timeout", timeout, kRendezvousTimeout);
            self.bus().wait([&] { self.get().wait_peers(jobs, version, limit); });
          },
          nb::arg("jobs"), nb::arg("version") = 0, nb::arg("timeout") = nb::none())
      .def("torn", [](PyBatch& self) { return released([&] { return self.get().torn(); }); })
      .def("undecided", [](PyBatch& self) { return released([&] { return self.get().undecided(); }); })
      .def("stats", [](PyBatch& self) { return released([&] { return self.get().stats(); }); })
      .def(
          "digests",
          [](PyBatch& self) {
            nb::dict result;
            for (const TensorDigest& digest : released([&] { return self.get().digests(); }))
              result[digest.name.c_str()] = digest.to_string();
            return result;
          },
          nb::sig("def digests(self) -> dict[str, str]"))
      .def(
          "close",
          [](PyBatch& self, double linger) {
            const Timeout limit = timeout_from("linger", linger, {});
            Untaken untaken;
            call_interruptibly([&] { untaken = self.get().close(limit); }, [&] { self.bus().interrupt(); });
            return std::pair(untaken.version, untaken.jobs);
          },
          nb::arg("linger") = 0.0,
          "Returns a version and the jobs that were attached and have not taken it; 0 if there are none.");
}

// A batch over one pair, or several with the same peer job.
std::unique_ptr<PyBatch> register_batch(SharedBus bus, const std::string& id,
                                        const std::vector<std::pair<PyPair*, std::vector<TensorSpec>>>& tensors,
                                        bool sends, std::optional<double> timeout, const std::string& mode,
                                        int snapshots, bool pinned, bool delta, const std::stop_source* stop,
                                        std::optional<double> grace) {
  const Timeout limit = timeout_from("timeout", timeout, kRendezvousTimeout);
  const BatchOptions options{.mode = mode_from(mode),
                             .snapshots = snapshots,
                             .grace = timeout_from("grace", grace, kPeerGrace),
                             .pinned = pinned,
                             .delta = delta,
                             .linger = Timeout(0),  // a dropped one; close() is told
                             .stop = token_of(stop)};
  std::vector<BatchPart> parts;
  for (const auto& [pair, specs] : tensors) parts.push_back({.pair = &pair->get(), .tensors = specs});
  std::optional<Batch> batch;
  bus->wait([&] {
    batch = sends ? bus->get().offer(id, parts, limit, options) : bus->get().accept(id, parts, limit, options);
  });
  return std::make_unique<PyBatch>(std::move(bus), std::move(*batch));
}

}  // namespace

void bind_bus(nb::module_& module) {
  bind_handle(module);
  bind_batch(module);
  nb::class_<std::stop_source>(module, "StopSource", "Ends the calls that are given it, those that begin later, too.")
      .def(nb::init<>())
      .def("request_stop", [](std::stop_source& self) { released([&] { self.request_stop(); }); });
  module.def("check_name", check_name, nb::arg("what"), nb::arg("name"),
             "Raises InvalidArgumentError unless the text may name a job, pair, batch or namespace.");
  nb::class_<PyBus>(module, "Bus")
      .def(nb::init<std::string, Rank, int, std::string, std::string, std::string, int, Digests, std::optional<double>,
                    std::optional<double>, const std::stop_source*>(),
           nb::kw_only(), nb::arg("job"), nb::arg("rank"), nb::arg("world"), nb::arg("store") = "",
           nb::arg("namespace") = "", nb::arg("agent") = "", nb::arg("threads") = 0, nb::arg("digest") = true,
           nb::arg("timeout") = nb::none(), nb::arg("stall") = nb::none(), nb::arg("stop") = nb::none())
      .def("register_batch", register_batch, nb::arg("batch"), nb::arg("tensors"), nb::arg("sends"),
           nb::arg("timeout") = nb::none(), nb::arg("mode") = "inplace", nb::arg("snapshots") = 2,
           nb::arg("pinned") = false, nb::arg("delta") = false, nb::arg("stop") = nb::none(),
           nb::arg("grace") = nb::none(), "Of [(pair, tensors)]. Blocks until the other job has registered it.")
      .def_prop_ro("world", &PyBus::world, "Ranks of this job.")
      .def("close", &PyBus::close, "Leaves once its pairs and batches have gone. Idempotent.")
      .def("interrupt", &PyBus::interrupt, "Ends what waits for other ranks now, on any thread; later calls work.")
      .def("end_waits", &PyBus::end_waits, "Ends what waits for other ranks, on any thread, and what would later.")
      .def("alive", [](PyBus& self) { return released([&] { return self.get().alive(); }); });
  nb::class_<PyPair>(module, "Pair")
      .def(nb::init<SharedBus, const std::string&, const std::string&, std::optional<double>, std::optional<Layout>,
                    std::vector<std::string>>(),
           nb::arg("bus"), nb::arg("name"), nb::arg("peer"), nb::arg("timeout") = nb::none(),
           nb::arg("layout") = nb::none(), nb::arg("peers") = std::vector<std::string>(),
           "Pairs this job with `peer`, or with several `peers`, which it does not wait for.")
      .def("close", &PyPair::close, "Leaves once its batches have gone. Idempotent.")
      .def("peer_world", [](PyPair& self) { return self.get().peer_world(); })
      .def(
          "membership", [](PyPair& self) { return self.get().membership(); },
          "A number for the processes that hold this job's ranks, the same on all of them.")
      .def("all_gather", &PyPair::all_gather, nb::arg("batch"), nb::arg("value"), nb::arg("timeout") = nb::none(),
           nb::arg("stop") = nb::none())
      .def("give_up", &PyPair::give_up, nb::arg("batch"), nb::arg("code"), nb::arg("text"),
           "Tells the ranks of both jobs that this one does not register the batch, and why.")
      .def("manifest", &PyPair::manifest, nb::arg("batch"), nb::arg("timeout") = nb::none(),
           nb::arg("stop") = nb::none());
}

}  // namespace tessera::python
