// A rank whose part of the bus protocol a test scripts.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fail.h"
#include "base/mutex.h"
#include "base/socket.h"
#include "base/testing.h"
#include "bus/registration/batch_exchange.h"
#include "bus/registration/local_tensors.h"
#include "bus/registration/manifest.h"
#include "bus/registration/rendezvous.h"
#include "bus/session/versions.h"
#include "peer/agent.h"
#include "peer/exchange/messages.h"
#include "tessera/store.h"
#include "tests/support/jobs.h"
#include "transport/transport.h"

namespace tessera::test {

// A rank that registers like others and is then scripted. Frames are kept until they are asked for.
class RawRank final : public Acceptor {
 public:
  RawRank(const std::string& store, const Side& side)
      : store_(open_store(store)),
        agent_({"default", side.job, side.rank, side.world}, 1),
        rendezvous_(*store_, agent_.identity(),
                    {.incarnation = agent_.incarnation(),
                     .world = agent_.identity().world,
                     .address = agent_.address(),
                     .release = "test",
                     .worker = {}},
                    agent_.waits(), agent_.loop()),
        exchange_(rendezvous_, "weights", side.peer, "policy") {
    rendezvous_.claim({.deadline = soon(), .stop = {}});
    view_ = rendezvous_.join("weights", side.peer, {.deadline = soon(), .stop = {}});
  }
  ~RawRank() override {
    agent_.run_on_loop([this] {
      agent_.close_session(session_, this);
      if (link_) link_->close();
      link_ = nullptr;
      for (const auto& link : pullers_) link->close();
      pullers_.clear();
    });
  }

  void exchange(std::span<const TensorSpec> tensors, bool sends) {
    const auto manifest = bus::manifest_of(agent_.identity(), tensors);
    session_ = exchange_
                   .exchange(view_,
                             {.sends = sends,
                              .digest = true,
                              .version = 0,
                              .manifest = std::make_shared<const bus::Manifest>(manifest)},
                             {.deadline = soon(), .stop = {}})
                   .session;
  }
  // A first registration, without reading those of others; exchange() follows with another one.
  void register_first(std::span<const TensorSpec> tensors, bool sends) {
    const bus::BatchRecord record{.of = {agent_.incarnation(), 0},
                                  .sends = sends,
                                  .digest = true,
                                  .version = 0,
                                  .hash = bus::manifest_of(agent_.identity(), tensors).hash(),
                                  .diff = {}};
    const Identity& self = agent_.identity();
    const std::string meeting = bus::meeting_prefix(self.name_space, "weights", "policy", self.job, view_.peer_job);
    store_->put(bus::batch_key(meeting, self.job, self.rank), write_record(record), {}, soon().left());
  }
  void take_back() { exchange_.withdraw(); }
  void give_up() {
    exchange_.report(Status(ErrorCode::kCancelled, "enough"));
    exchange_.withdraw();
  }
  // As a receiver: until Prepared. A sender that finds out now that a rank of its job has registered again detaches,
  // and is called again.
  void attach_to(Rank rank, bool stream) {
    const Deadline deadline = soon();
    while (!prepared_by(rank, stream, deadline)) drop_link();
  }
  // As a rank whose terms are read, and that sends nothing itself; or, if `sends`, as a sender.
  void serve(bool sends = false) {
    serves_pulls_ = sends;
    agent_.run_on_loop([this] { agent_.open_session(session_, this); });
  }
  void accept(Caller caller) override {
    if (caller.attach.purpose == Attach::Purpose::kPull && !serves_pulls_) return serve_nothing(std::move(caller.link));
    adopt(std::move(caller.link));
    const MutexLock lock(mutex_);
    called_ = true;
    changed_.notify_all();
  }
  void await_caller() {
    const MutexLock lock(mutex_);
    if (!changed_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return called_; }))
      throw Error(ErrorCode::kDeadlineExceeded, "nobody came for the terms");
  }
  // Tells that caller where `data` is.
  void send_place(const std::vector<float>& data) {
    await_caller();
    Attached attached;
    attached.keys.push_back(TransportRegistry::builtin().find("shm")->export_region({}));
    const RemoteRange memory{
        .key = 0, .offset = reinterpret_cast<uintptr_t>(data.data()), .bytes = data.size() * sizeof(float)};
    attached.places.push_back({.memory = memory, .origin = 0, .strides = {sizeof(float)}});
    send(attached);
  }

  template <typename Message>
  void send(const Message& message, std::vector<UniqueFd> fds = {}) {
    agent_.run_on_loop([&] { link_->send(message, std::move(fds)); });
  }
  const bus::RankRecord& peer(Rank rank) const { return view_.peer[static_cast<size_t>(rank)]; }
  const std::string& session() const { return session_; }
  Hello hello() const { return agent_.hello(); }
  // The next message, which must be of that type; throws the reason if the link ends instead.
  template <typename Message>
  Message next() {
    const auto [type, payload] = take();
    if (type != kCode<Message>)
      fail(ErrorCode::kMismatch, "message {} where {} was due"_message, type, kNameOf<Message::kType>);
    return parse<Message>(payload);
  }
  // The next message of that type; skips others.
  template <typename Message>
  Message until() {
    for (;;) {
      auto [type, payload] = take();
      if (type == kCode<Message>) return parse<Message>(payload);
    }
  }

 private:
  // Whether it has prepared; if not, it has detached.
  bool prepared_by(Rank rank, bool stream, const Deadline& deadline) {
    const Attach attach{.pair = "weights", .batch = "policy", .purpose = Attach::Purpose::kPull, .session = session_};
    const bus::RankRecord& record = peer(rank);
    agent_.call({record.address, rank_name(view_.peer_job, rank), record.incarnation}, attach, deadline,
                [&](std::shared_ptr<Link> link) { adopt(std::move(link)); });
    if (!next_unless_detached<Attached>()) return false;
    send(Prepare{.stream = stream, .skipped = {}});
    return next_unless_detached<Prepared>();
  }
  template <typename Message>
  bool next_unless_detached() {
    const auto [type, payload] = take();
    if (type == kCode<Detach>) return false;
    if (type != kCode<Message>)
      fail(ErrorCode::kMismatch, "message {} where {} was due"_message, type, kNameOf<Message::kType>);
    return true;
  }
  void drop_link() {
    agent_.run_on_loop([this] {
      link_->set_handlers([](Frame&) {}, [](const Status&) {});
      link_->close();
      link_ = nullptr;
    });
    const MutexLock lock(mutex_);
    frames_.clear();
    end_ = {};
  }
  std::pair<uint16_t, std::vector<std::byte>> take() {
    const MutexLock lock(mutex_);
    if (!changed_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return !frames_.empty() || !end_.ok(); }))
      throw Error(ErrorCode::kDeadlineExceeded, "no message came");
    if (frames_.empty()) end_.throw_if_error();
    auto frame = std::move(frames_.front());
    frames_.pop_front();
    return frame;
  }
  void serve_nothing(std::shared_ptr<Link> link) {
    link->set_handlers(
        [raw = link.get()](Frame& frame) {
          if (frame.type == kCode<Prepare>) raw->send(Prepared{});
        },
        [](const Status&) {});
    link->send(Attached{});
    pullers_.push_back(std::move(link));
  }
  void adopt(std::shared_ptr<Link> link) {
    link_ = std::move(link);
    link_->set_handlers(
        [this](Frame& frame) {
          const MutexLock lock(mutex_);
          frames_.emplace_back(frame.type, frame.payload);
          changed_.notify_all();
        },
        [this](const Status& status) {
          const MutexLock lock(mutex_);
          end_ = status;
          changed_.notify_all();
        });
  }

  std::shared_ptr<Store> store_;
  Agent agent_;
  bus::Rendezvous rendezvous_;
  bus::BatchExchange exchange_;
  bus::PairView view_;
  std::string session_;
  std::shared_ptr<Link> link_;  // on the loop's thread
  std::vector<std::shared_ptr<Link>> pullers_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::pair<uint16_t, std::vector<std::byte>>> frames_ GUARDED_BY(mutex_);
  Status end_ GUARDED_BY(mutex_);
  bool called_ GUARDED_BY(mutex_) = false;
  bool serves_pulls_ = false;  // on the loop's thread
};

}  // namespace tessera::test
