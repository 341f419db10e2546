#include "store/service.h"

#include "base/message.h"

namespace tessera::store {
namespace {

constexpr size_t kRememberedTransactions = 4096;

}  // namespace

std::vector<std::byte> Service::answer(const Request& request) {
  try {
    ByteWriter out;
    write_fields(ReplyHead{.request = request.id}, out);
    switch (request.op) {
      case Op::kRange:
        write_fields(range(request), out);
        break;
      case Op::kErase: {
        const size_t erased = request.prefix ? state_.erase_prefix(request.key) : state_.erase(request.key);
        write_fields(EraseReply{.count = static_cast<int64_t>(erased)}, out);
        break;
      }
      case Op::kTransact:
        write_fields(transact(request), out);
        break;
      case Op::kGrant:
        state_.grant(request.lease.lease, request.lease.ttl, clock_.now());
        break;
      case Op::kRevoke:
        for (const LeaseId lease : request.leases) state_.revoke(lease);
        break;
    }
    return out.take();
  } catch (...) {
    return message_bytes(ReplyHead{.request = request.id, .status = status_of_current_exception()});
  }
}

namespace {

void check_reply_bytes(size_t bytes, const std::string& of) {
  if (bytes > kMaxReplyBytes)
    fail(ErrorCode::kResourceExhausted, "{} holds {} bytes, more than one reply takes ({}): ask for less"_message, of,
         bytes, kMaxReplyBytes);
}

// Computed before any of it is copied.
size_t bytes_of(const std::vector<Record>& records) {
  size_t bytes = 0;
  for (const Record& record : records) bytes += record->key.size() + record->value.size();
  return bytes;
}

}  // namespace

RangeReplyOf<Record> Service::range(const Request& request) const {
  std::vector<Record> records;
  if (request.prefix) {
    records = state_.find_prefix(request.key);
  } else if (const Record record = state_.find(request.key)) {
    records.push_back(record);
  }
  check_reply_bytes(bytes_of(records), fmt::format("'{}'", request.key));
  return {.revision = state_.revision(), .keys = std::move(records)};
}

TransactReply Service::transact(const Request& request) {
  const auto done = done_.find(request.token);
  if (done != done_.end()) return done->second;

  const State::Outcome outcome = state_.transact(request.transaction);
  check_reply_bytes(bytes_of(outcome.current), "what the transaction compares");
  TransactReply reply{.succeeded = outcome.succeeded, .revision = state_.revision(), .marks = {}, .current = {}};
  for (const Record& record : outcome.stored)
    reply.marks.push_back({.create_revision = record->create_revision, .version = record->version});
  for (const Record& record : outcome.current) reply.current.push_back(*record);
  if (!reply.succeeded || request.transaction.operations.empty()) return reply;

  done_.emplace(request.token, reply);
  done_order_.push_back(request.token);
  if (done_order_.size() > kRememberedTransactions) {
    done_.erase(done_order_.front());
    done_order_.pop_front();
  }
  return reply;
}

}  // namespace tessera::store
