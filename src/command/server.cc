#include "command/server.h"

#include <atomic>
#include <vector>

#include "base/fail.h"
#include "base/futex.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace tessera {

Replier::~Replier() {
  if (log_) fail(Status(ErrorCode::kInternal, "the agent has dropped the command"));
}

void Replier::succeed(std::span<const std::byte> result) {
  if (result.size() > kMaxRecordPayload)
    return fail(failed_internal("a result of {} bytes, where {} fit", result.size(), kMaxRecordPayload));
  answer({.status = {}, .result = {result.begin(), result.end()}});
}

void Replier::fail(const Status& status) {
  TESSERA_CHECK(!status.ok());
  answer({.status = status, .result = {}});
}

void Replier::answer(CommandOutcome outcome) {
  TESSERA_CHECK(log_ != nullptr);
  std::exchange(log_, nullptr)->finish(id_, std::move(outcome));
}

// Shared with the log, which may answer through it at any time.
struct CommandServer::State final : public ReplySink, public std::enable_shared_from_this<State> {
  State(std::shared_ptr<CommandMemory> queue, std::shared_ptr<CommandLog> client_log, std::string client_name,
        Handler client_handler, EndHandler end_handler)
      : memory(std::move(queue)),
        log(std::move(client_log)),
        client(std::move(client_name)),
        handler(std::move(client_handler)),
        on_end(std::move(end_handler)),
        commands(memory->commands(), command_spin()),
        replies(memory->replies(), Duration::zero()) {}

  void run();
  void take(const Record& record);
  bool admit();
  void execute(const Command& command);
  void reply(uint64_t id, const CommandOutcome& outcome) override;
  void end(const Status& reason);

  const std::shared_ptr<CommandMemory> memory;
  const std::shared_ptr<CommandLog> log;
  const std::string client;
  const Handler handler;
  const EndHandler on_end;
  CommandConsumer commands;  // used by the thread
  std::atomic<bool> ending{false};
  std::atomic<uint32_t> finished{0};  // the thread is about to end

  Mutex mutex;
  CommandProducer replies;                    // pushed to with the mutex held; anybody may close it
  size_t on_their_way GUARDED_BY(mutex) = 0;  // taken, without a reply yet
  std::vector<std::byte> payload GUARDED_BY(mutex);
  bool ended GUARDED_BY(mutex) = false;
  Status why GUARDED_BY(mutex);
};

void CommandServer::State::run() {
  Record record;
  while (true) {
    const RingState state = commands.pop(record, Deadline::at(TimePoint::max()));
    if (state == RingState::kBroken)
      end(failed(ErrorCode::kDataLoss, "its memory holds data that no client writes"_message));
    if (state != RingState::kReady || ending.load(std::memory_order_acquire)) break;
    take(record);
  }
  end({});
  if (on_end) {
    Status reason;
    {
      const MutexLock lock(mutex);
      reason = why;
    }
    on_end(reason);
  }
  finished.store(1, std::memory_order_release);
  futex_wake(finished);
}

void CommandServer::State::take(const Record& record) {
  Metrics::process().commands.add();
  if (record.head.incarnation != log->incarnation())
    return end(failed(ErrorCode::kDataLoss, "command {} is of another incarnation"_message, record.head.id));
  if (!admit())
    return end(
        failed(ErrorCode::kDataLoss, "more than {} commands are on their way"_message, memory->replies().capacity()));
  if (log->begin(record.head.id, shared_from_this()))
    execute({.id = record.head.id, .type = record.head.type, .payload = record.payload()});
}

bool CommandServer::State::admit() {
  const MutexLock lock(mutex);
  return ++on_their_way <= memory->replies().capacity();
}

void CommandServer::State::execute(const Command& command) {
  Replier replier(log, command.id);
  try {
    handler(command, replier);
  } catch (...) {
    if (replier) replier.fail(status_of_current_exception());
  }
}

void CommandServer::State::reply(uint64_t id, const CommandOutcome& outcome) {
  RingState state = RingState::kReady;
  {
    const MutexLock lock(mutex);
    --on_their_way;
    const uint16_t type = write_outcome(outcome, payload);
    state = replies.try_push({.incarnation = log->incarnation(), .id = id, .type = type}, payload);
  }
  if (state == RingState::kBroken || state == RingState::kNotYet)
    end(failed(ErrorCode::kDataLoss, "it leaves no room for replies"_message));
}

void CommandServer::State::end(const Status& reason) {
  {
    const MutexLock lock(mutex);
    if (!std::exchange(ended, true) && !reason.ok())
      why = failed(reason.code(), "the command queue of {} has ended: {}"_message, client, reason.message());
  }
  ending.store(true, std::memory_order_release);
  commands.close();
  replies.close();
}

CommandServer::CommandServer(std::shared_ptr<CommandMemory> memory, std::shared_ptr<CommandLog> log, std::string client,
                             Handler handler, EndHandler on_end)
    : state_(std::make_shared<State>(std::move(memory), std::move(log), std::move(client), std::move(handler),
                                     std::move(on_end))) {
  if (state_->memory->incarnation() != state_->log->incarnation())
    fail(ErrorCode::kInvalidArgument, "command queue of {}: it is of incarnation {:016x}, the log of {:016x}"_message,
         state_->client, state_->memory->incarnation(), state_->log->incarnation());
  thread_ = start_thread("tessera-cmd", [state = state_] { state->run(); });
}

CommandServer::~CommandServer() {
  if (!process_.here()) {
    thread_.detach();  // the thread belongs to the parent
    return;
  }
  // Once is enough, unless the client keeps setting the word on which the thread sleeps.
  while (state_->finished.load(std::memory_order_acquire) == 0) {
    close(Status(ErrorCode::kCancelled, "the agent has closed it"_message));
    futex_wait(state_->finished, 0, Deadline::after(std::chrono::milliseconds(100)));
  }
  thread_.join();
}

void CommandServer::close(const Status& reason) {
  state_->end(reason);
}

const CommandRing& CommandServer::commands() const {
  return state_->memory->commands();
}

}  // namespace tessera
