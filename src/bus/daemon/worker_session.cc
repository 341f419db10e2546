#include "bus/daemon/worker_session.h"

#include <poll.h>

#include <random>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "bus/embedded.h"
#include "bus/lending/lending_runs.h"
#include "bus/registration/local_tensors.h"
#include "bus/registration/records.h"
#include "memory/host/shared_arena.h"
#include "peer/agent.h"
#include "tessera/memory.h"

namespace tessera::bus {
namespace {

constexpr Duration kAnswerTimeout = seconds(10);  // for a worker to read an answer
constexpr Duration kProcessEnds = seconds(0.1);   // between the end of a process's sockets and its own
constexpr Timeout kLongestCall = std::chrono::hours(2);

uint64_t draw_number() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

void cancel(Operation& operation) {
  try {
    operation.cancel();
  } catch (const Error& error) {
    log_event(LogLevel::info, "cancel.failed", {}, "agent: {}", error.what());
  }
}
void close(BatchImpl& batch, const Status& why = {}) {
  try {
    batch.part(why);
  } catch (const Error& error) {
    log_event(LogLevel::warn, "batch.unclosed", {}, "agent: {}", error.what());
  }
}

OperationState ended_state() {
  OperationState state;
  state.done = true;
  return state;
}
OperationState state_of(Operation& operation) {
  OperationState state;
  state.done = operation.done();
  if (state.done) {
    try {
      operation.wait();
    } catch (const Error& error) {
      state.status = Status(error.code(), error.what());
    }
  }
  state.version = operation.version();
  state.progress = operation.progress();
  return state;
}

}  // namespace

bool WorkerConnection::answer(AgentMessage type, std::span<const std::byte> payload) noexcept {
  try {
    FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
    writer.push(static_cast<uint16_t>(type), payload);
    writer.flush(socket.get(), Deadline::after(kAnswerTimeout));
    return true;
  } catch (const Error& error) {
    log_event(LogLevel::info, "answer.failed", {}, "agent: an answer cannot be given: {}", error.what());
    return false;
  }
}

WorkerSession::WorkerSession(OpenSession open, std::shared_ptr<WorkerConnection> connection)
    : number_(draw_number()),
      worker_(std::move(open.worker)),
      connection_(std::move(connection)),
      options_(std::move(open.options)) {
  options_.agent = kEmbeddedAgent;
  options_.stop = stop_.get_token();
}

std::string WorkerSession::name() const {
  return fmt::format("the worker {}", worker_.to_string());
}

// --- its life ------------------------------------------------------------------------------------

void WorkerSession::open(const std::shared_ptr<CommandMemory>& memory) {
  std::shared_ptr<BusClient> bus = open_embedded(complete(options_), worker_);
  {
    const MutexLock lock(mutex_);
    bus_ = bus;
  }
  commands_ =
      std::make_unique<CommandServer>(memory, std::make_shared<CommandLog>(memory->incarnation()), name(),
                                      [this](const Command& command, Replier& replier) { execute(command, replier); });
  show_queue(*bus, [&ring = commands_->commands()] {
    return CommandQueueReport{.queued = static_cast<uint32_t>(ring.size()),
                              .capacity = static_cast<uint32_t>(ring.capacity())};
  });
}

void WorkerSession::show_queue(BusClient& bus, std::function<CommandQueueReport()> queue) {
  Agent& agent = embedded_agent(bus);
  agent.run_on_loop([&] { agent.set_command_queue(std::move(queue)); });
}

void WorkerSession::interrupt() {
  std::shared_ptr<BusClient> bus;
  {
    const MutexLock lock(mutex_);
    bus = bus_;
  }
  if (bus) bus->interrupt();
}

void WorkerSession::retire() {
  {
    const MutexLock lock(mutex_);
    retired_ = true;
  }
  stop_.request_stop();
}

std::shared_ptr<WorkerSession::Serving> WorkerSession::Serving::begin(std::shared_ptr<WorkerSession> session) {
  return session->begin_serving() ? std::make_shared<Serving>(std::move(session)) : nullptr;
}

bool WorkerSession::begin_serving() {
  const MutexLock lock(mutex_);
  if (retired_) return false;
  ++serving_;
  return true;
}

void WorkerSession::end_serving() {
  const MutexLock lock(mutex_);
  --serving_;
  idle_.notify_all();
}

bool WorkerSession::hastened() const {
  const MutexLock lock(mutex_);
  return hastened_;
}

void WorkerSession::hasten() {
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const MutexLock lock(mutex_);
    hastened_ = true;
    for (const auto& [id, operation] : operations_)
      if (operation) operations.push_back(operation);
  }
  for (const auto& operation : operations) cancel(*operation);
}

Status WorkerSession::why_gone(bool vanished) const {
  if (!vanished) return {};
  const bool died = await_end(worker_, Deadline::after(kProcessEnds));
  return failed(ErrorCode::kPeerLost, "the worker of {} has {}"_message, rank_name(options_.job, options_.rank),
                died ? "died" : "gone");
}

void WorkerSession::end(bool vanished) {
  const Status why = why_gone(vanished);
  std::map<uint32_t, RegisteredBatch> batches;
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const MutexLock lock(mutex_);
    // Everything that waits has been told to stop.
    if (!idle_.wait_until(mutex_, Deadline::after(kLongestCall), [this]() REQUIRES(mutex_) { return serving_ == 0; }))
      log_event(LogLevel::err, "calls.unended", {}, "{}: {} calls do not end"_message, name(), serving_);
    batches = std::exchange(batches_, {});
    for (const auto& [id, operation] : operations_)
      if (operation) operations.push_back(operation);
  }
  for (auto& [number, registered] : batches)
    if (!registered.sends) close(*registered.batch, why);
  for (const auto& operation : operations) {
    {
      const MutexLock lock(mutex_);
      if (!hastened_ && !operation->done())
        log_event(LogLevel::info, "worker.gone", {{"version", operation->version()}},
                  "{} is gone; its send of version {} goes on", name(), operation->version());
    }
    if (hastened()) cancel(*operation);
    operation->wait_for(std::chrono::hours(1), {});  // each ends at its own deadline
  }
  operations.clear();
  // A worker that is still there is told how its last operation ended before the queue is closed: until it knows, it
  // must not touch the operation's memory.
  std::shared_ptr<BusClient> bus;
  {
    const MutexLock lock(mutex_);  // they have ended and are about to say so
    idle_.wait_until(mutex_, Deadline::after(kAnswerTimeout),
                     [this]() REQUIRES(mutex_) { return operations_.empty(); });
    bus = bus_;
  }
  if (commands_) commands_->close(failed(ErrorCode::kCancelled, "{} has gone"_message, name()));
  for (auto& [number, registered] : batches) close(*registered.batch, why);
  batches.clear();
  if (commands_) show_queue(*bus, {});
  commands_.reset();
  settling_.reset();
  std::map<uint32_t, std::shared_ptr<PairClient>> pairs;  // released without the lock, since they ask the store
  {
    const MutexLock lock(mutex_);
    pairs.swap(pairs_);
    bus_.reset();
  }
  pairs.clear();
}

// --- calls ---------------------------------------------------------------------------------------

void WorkerSession::serve(WorkerConnection& connection, const Frame& frame) {
  const auto type = static_cast<AgentMessage>(frame.type);
  switch (type) {
    case AgentMessage::kPair: {
      const Paired paired = join(read_message<PairCall>(frame.payload, name()));
      if (!connection.answer(paired)) remove_pair(paired.pair);
      return;
    }
    case AgentMessage::kManifest: {
      const auto call = read_message<ManifestCall>(frame.payload, name());
      connection.answer(Offered{.manifest = {.entries = pair(call.pair)->manifest(call.batch, call.timeout,
                                                                                  connection.given_up.get_token())}});
      return;
    }
    case AgentMessage::kAllGather: {
      const auto call = read_message<AllGatherCall>(frame.payload, name());
      connection.answer(Gathered{.values = pair(call.pair)->all_gather(call.batch, call.value, call.timeout,
                                                                       connection.given_up.get_token())});
      return;
    }
    case AgentMessage::kGiveUp: {
      const auto call = read_message<GiveUpCall>(frame.payload, name());
      pair(call.pair)->give_up(call.batch, call.why);
      connection.answer(Number{.value = 1});
      return;
    }
    case AgentMessage::kRegister: {
      auto call = read_message<RegisterCall>(frame.payload, name());
      call.options.stop = connection.given_up.get_token();
      const Registered registered = register_batch(std::move(call), std::move(connection.arenas));
      if (!connection.answer(registered)) close_batch(registered.batch, {});  // the name can be registered again
      return;
    }
    case AgentMessage::kCloseBatch: {
      const auto call = read_message<ObjectCall>(frame.payload, name());
      connection.answer(BatchClosed{.untaken = close_batch(call.object, call.timeout)});
      return;
    }
    case AgentMessage::kDigests: {
      const auto call = read_message<ObjectCall>(frame.payload, name());
      connection.answer(DigestList{.digests = batch(call.object)->digests()});
      return;
    }
    case AgentMessage::kWaitPeers: {
      const auto call = read_message<WaitPeersCall>(frame.payload, name());
      batch(call.batch)->wait_peers(call.jobs, call.version, call.timeout);
      connection.answer(Number{.value = 1});
      return;
    }
    case AgentMessage::kPeers: {
      const auto call = read_message<ObjectCall>(frame.payload, name());
      connection.answer(PeerList{.peers = batch(call.object)->peers()});
      return;
    }
    default:
      connection.answer(Number{.value = number_of(type, read_message<ObjectCall>(frame.payload, name()))});
  }
}

std::shared_ptr<PairClient> WorkerSession::pair(uint32_t number) const {
  const MutexLock lock(mutex_);
  const auto it = pairs_.find(number);
  if (it == pairs_.end()) fail(ErrorCode::kNotFound, "agent: {} has no pair {}"_message, name(), number);
  return it->second;
}

std::shared_ptr<BatchImpl> WorkerSession::batch(uint32_t number) const {
  const MutexLock lock(mutex_);
  if (retired_)
    fail(ErrorCode::kPeerLost, "agent of {}: the session has ended"_message, rank_name(options_.job, options_.rank));
  const auto it = batches_.find(number);
  if (it == batches_.end()) fail(ErrorCode::kNotFound, "agent: {} has no batch {}"_message, name(), number);
  return it->second.batch;
}

WorkerSession::Found WorkerSession::operation(uint64_t command) const {
  const MutexLock lock(mutex_);
  const auto it = operations_.find(command);
  return it == operations_.end() ? Found{} : Found{.under_way = true, .operation = it->second};
}

std::shared_ptr<BusClient> WorkerSession::bus() const {
  const MutexLock lock(mutex_);
  if (!bus_)
    fail(ErrorCode::kNotFound, "agent of {}: there is no such session any more"_message,
         rank_name(options_.job, options_.rank));
  return bus_;
}

Paired WorkerSession::join(const PairCall& call) {
  check(options_, call.options);
  std::shared_ptr<PairClient> joined = bus()->pair(call.options);
  Paired paired{.peer_world = joined->peer_world(), .membership = joined->membership()};
  const MutexLock lock(mutex_);
  pairs_.emplace(++last_number_, std::move(joined));
  paired.pair = last_number_;
  return paired;
}

int64_t WorkerSession::number_of(AgentMessage type, const ObjectCall& call) {
  switch (type) {
    case AgentMessage::kCommit:
      return batch(call.object)->commit();
    case AgentMessage::kWaitVersion:
      return batch(call.object)->wait_version(call.version, call.timeout);
    case AgentMessage::kWithdraw:
      return batch(call.object)->withdraw(call.version) ? 1 : 0;
    case AgentMessage::kClosePair: {
      const std::shared_ptr<PairClient> closed = remove_pair(call.object);
      if (!closed) fail(ErrorCode::kNotFound, "agent: {} has no pair {}"_message, name(), call.object);
      return 1;
    }
    default:
      fail(ErrorCode::kInvalidArgument, "agent: message {} is not a call"_message, static_cast<int>(type));
  }
}

std::shared_ptr<PairClient> WorkerSession::remove_pair(uint32_t number) {
  const MutexLock lock(mutex_);
  const auto node = pairs_.extract(number);
  return node ? node.mapped() : nullptr;
}

Untaken WorkerSession::close_batch(uint32_t number, Timeout linger) {
  Untaken untaken = batch(number)->close(linger);
  RegisteredBatch closed;
  const MutexLock lock(mutex_);
  if (auto node = batches_.extract(number)) closed = std::move(node.mapped());  // or another call has closed it
  return untaken;
}

Registered WorkerSession::register_batch(RegisterCall call, std::vector<UniqueFd> fds) {
  const std::shared_ptr<PairClient> with = pair(call.pair);
  std::shared_ptr<LentMemory> lent;
  UniqueFd lender;
  if (call.lent_bytes > 0) {
    if (fds.empty()) fail(ErrorCode::kInvalidArgument, "agent: {} lends memory and gives no socket"_message, name());
    lender = std::move(fds.back());
    fds.pop_back();
    lent = std::make_shared<LentMemory>(call.lent_bytes, worker_, name());
  }
  std::vector<std::shared_ptr<SharedArena>> arenas;
  for (const UniqueFd& fd : fds) arenas.push_back(SharedHeap::process().adopt(fd.get(), !call.sends, name()));
  const Identity identity{options_.name_space, options_.job, options_.rank, options_.world};
  std::vector<TensorSpec> specs;
  // The memory that a tensor's offset counts from, and its size.
  const auto memory_of = [&](const RegisterCall::Tensor& tensor) -> std::span<std::byte> {
    const uint32_t arena = tensor.place->arena;
    if (arena == RegisterCall::kLent && lent) return {lent->data(), lent->bytes()};
    if (arena < arenas.size()) return {arenas[arena]->data(), arenas[arena]->bytes()};
    return {};
  };
  for (RegisterCall::Tensor& tensor : call.tensors) {
    if (tensor.place) {
      const std::span<std::byte> memory = memory_of(tensor);
      if (memory.empty() || tensor.place->offset > memory.size())
        fail(ErrorCode::kInvalidArgument, "tensor {}: it lies at {} of arena {}, which {} has not given"_message,
             tensor.spec.name, tensor.place->offset, tensor.place->arena, name());
      tensor.spec.data = memory.data() + tensor.place->offset;
    }
    specs.push_back(tensor.spec);
  }
  std::vector<LocalTensor> tensors =
      registered_tensors(manifest_of(identity, specs, with->layout()), specs, identity.rank);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].empty()) continue;
    const auto bytes = static_cast<int64_t>(memory_of(call.tensors[i]).size());
    const ByteExtent extent = tensors[i].extent();
    const auto offset = static_cast<int64_t>(call.tensors[i].place->offset);
    if (offset + extent.begin < 0 || extent.end > bytes - offset)
      fail(ErrorCode::kInvalidArgument,
           "tensor {}: its bytes {} to {} around {} are not within the {} of its arena"_message, tensors[i].name,
           extent.begin, extent.end, offset, bytes);
  }
  std::shared_ptr<BatchImpl> batch;
  if (lent) {
    lent->set_tensors(std::move(tensors));
    batch = register_with(with, call.batch, specs, call.sends, call.timeout, call.options,
                          std::make_shared<LendingRuns>(embedded_agent(*bus()), lent, std::move(lender)));
  } else {
    batch = embedded_batch(with->register_batch(call.batch, specs, call.sends, call.timeout, call.options));
  }
  const MutexLock lock(mutex_);
  batches_.emplace(++last_number_, RegisteredBatch{std::move(batch), std::move(arenas), call.sends});
  return {.batch = last_number_};
}

// --- commands, on the queue's thread -------------------------------------------------------------

void WorkerSession::execute(const Command& command, Replier& replier) {
  switch (static_cast<AgentCommand>(command.type)) {
    case AgentCommand::kSend:
    case AgentCommand::kRecv:
    case AgentCommand::kStage:
      return transfer(command, replier);
    case AgentCommand::kCancel: {
      const auto operation = this->operation(read_message<CommandId>(command.payload, name()).id).operation;
      return replier.succeed(message_bytes(Number{operation && operation->cancel() ? 1 : 0}));
    }
    case AgentCommand::kProgress: {
      const Found found = operation(read_message<CommandId>(command.payload, name()).id);
      return replier.succeed(message_bytes(found.operation   ? state_of(*found.operation)
                                           : found.under_way ? OperationState{}
                                                             : ended_state()));
    }
    case AgentCommand::kState: {
      const auto found = batch(read_message<BatchNumber>(command.payload, name()).batch);
      return replier.succeed(message_bytes(BatchState{.version = found->version(),
                                                      .newest = found->newest(),
                                                      .torn = found->torn(),
                                                      .undecided = found->undecided()}));
    }
    case AgentCommand::kStats: {
      const auto found = batch(read_message<BatchNumber>(command.payload, name()).batch);
      return replier.succeed(message_bytes(BatchFigures{.stats = found->stats()}));
    }
  }
  fail(ErrorCode::kInvalidArgument, "agent: command {} is unknown"_message, command.type);
}

void WorkerSession::transfer(const Command& command, Replier& replier) {
  const auto serving = Serving::begin(shared_from_this());
  if (!serving)
    fail(ErrorCode::kPeerLost, "agent of {}: the session has ended"_message, rank_name(options_.job, options_.rank));
  const auto wanted = read_message<TransferCommand>(command.payload, name());
  const std::shared_ptr<BatchImpl> with = batch(wanted.batch);
  const auto type = static_cast<AgentCommand>(command.type);
  {
    const MutexLock lock(mutex_);
    operations_[command.id] = nullptr;
  }
  if (type == AgentCommand::kSend || !with->undecided())
    return begin_transfer(type, command.id, wanted, with, std::move(replier));
  // The store is asked first, which may take seconds; other commands are answered in the meantime.
  const auto owed = std::make_shared<Replier>(std::move(replier));
  try {
    if (!settling_) {
      auto settling = std::make_unique<EventLoop>("tessera-settle");
      settling->start();
      settling_ = std::move(settling);
    }
    settling_->post([this, serving, type, id = command.id, wanted, with, owed] {
      begin_transfer(type, id, wanted, with, std::move(*owed));
    });
  } catch (...) {
    end_transfer(command.id, *owed, status_of_current_exception());
  }
}

void WorkerSession::begin_transfer(AgentCommand type, uint64_t id, const TransferCommand& wanted,
                                   const std::shared_ptr<BatchImpl>& with, Replier replier) {
  const auto owed = std::make_shared<Replier>(std::move(replier));
  std::shared_ptr<Operation> operation;
  try {
    operation = embedded_operation(type == AgentCommand::kSend   ? with->send(wanted.version, wanted.timeout)
                                   : type == AgentCommand::kRecv ? with->recv(wanted.version, wanted.timeout)
                                                                 : with->stage(wanted.version, wanted.timeout));
  } catch (...) {
    return end_transfer(id, *owed, status_of_current_exception());
  }
  bool hurries = false;
  {
    const MutexLock lock(mutex_);
    operations_[id] = operation;
    hurries = hastened_;
  }
  if (hurries) cancel(*operation);
  operation->on_end([self = shared_from_this(), operation, id, owed] {
    OperationState state = state_of(*operation);
    const MutexLock lock(self->mutex_);
    if (self->retired_ && state.status.code() == ErrorCode::kCancelled)  // not by the worker
      state.status = failed(ErrorCode::kPeerLost, "agent of {}: the session has ended: {}"_message,
                            rank_name(self->options_.job, self->options_.rank), state.status.message());
    owed->succeed(message_bytes(state));
    self->operations_.erase(id);
    self->idle_.notify_all();
  });
}

void WorkerSession::end_transfer(uint64_t id, Replier& owed, const Status& why) {
  const MutexLock lock(mutex_);
  operations_.erase(id);
  owed.fail(why);
  idle_.notify_all();
}

}  // namespace tessera::bus
