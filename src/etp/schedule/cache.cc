#include "etp/schedule/cache.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutation.h"
#include "layout/text_reader.h"

namespace tessera::etp {

BufferCache::BufferCache(BufferMemory memory, std::optional<int64_t> cap_bytes)
    : memory_(std::move(memory)), cap_bytes_(cap_bytes) {}

BufferCache::~BufferCache() {
  for (const Pool& pool : pools_)
    for (const uint32_t index : pool.all) {
      const Buffer& buffer = buffers_[index];
      memory_of(buffer).free(buffer.memory, pool.bytes, buffer.last);
    }
}

BufferTicket BufferCache::reserve(const BufferKey& key, std::string_view weight) {
  if (key.rows < 1 || key.columns < 1)
    fail(ErrorCode::kInvalidArgument, "a buffer without elements for weight {}: {}"_message, tessera::quoted(weight),
         to_string(key));
  const uint32_t pool = pool_of(key);
  const auto [name, new_name] = weight_of_.try_emplace(std::string(weight), static_cast<uint32_t>(weights_.size()));
  if (new_name) weights_.push_back({.name = name->first});
  tickets_.push_back({.pool = pool, .weight = name->second});
  return {tickets_.size()};
}

uint32_t BufferCache::pool_of(const BufferKey& key) {
  const auto [pool, is_new] = pool_of_key_.try_emplace(key, static_cast<uint32_t>(pools_.size()));
  if (is_new) pools_.push_back({.key = key, .bytes = key.bytes()});
  return pool->second;
}

LentBuffer BufferCache::get(BufferTicket number) {
  return lend(number.number, false);
}

LentBuffer BufferCache::lend(uint64_t number, bool for_capture) {
  Ticket& ticket = find({number});
  Pool& pool = pools_[ticket.pool];
  if (!holds(ticket, number)) {
    ticket.buffer = choose(pool, ticket, for_capture);
    buffers_[ticket.buffer].holder = number;
    buffers_[ticket.buffer].used = true;
    hold(pool, ticket, 1);
    if (buffers_[ticket.buffer].captured == 0) kept_bytes_ += pool.bytes;
    pool.most_held = std::max(pool.most_held, static_cast<int64_t>(pool.all.size() - pool.free.size()));
  }
  const Buffer& buffer = buffers_[ticket.buffer];
  return {buffer.memory, pool.bytes, buffer.last};
}

LentBuffer BufferCache::capture(BufferTicket number) {
  const LentBuffer lent = lend(number.number, true);
  Ticket& ticket = find(number);
  if (ticket.captured || mutated(Mutation::kCaptureNotReserved)) return lent;
  ticket.captured = true;
  Buffer& buffer = buffers_[ticket.buffer];
  buffer.cleared = false;
  if (buffer.captured++ == 0) sums_.captured_bytes += lent.bytes;
  return lent;
}

void BufferCache::uncapture(BufferTicket number) {
  uncapture(find(number));
}

void BufferCache::uncapture(Ticket& ticket) {
  if (!std::exchange(ticket.captured, false)) return;
  Buffer& buffer = buffers_[ticket.buffer];
  if (--buffer.captured > 0) return;
  sums_.captured_bytes -= pools_[ticket.pool].bytes;
  if (buffer.holder == 0) kept_bytes_ -= pools_[ticket.pool].bytes;
}

bool BufferCache::is_free(BufferTicket number) const {
  const Ticket& ticket = find(number);
  return ticket.buffer != kNone && buffers_[ticket.buffer].holder == 0;
}

void BufferCache::put_back(BufferTicket number) {
  const Ticket& ticket = find(number);
  release(number, holds(ticket, number.number) ? buffers_[ticket.buffer].last : nullptr);
}

void BufferCache::release(BufferTicket number, LastReader last) {
  const Ticket& ticket = find(number);
  Pool& pool = pools_[ticket.pool];
  if (!holds(ticket, number.number))
    fail(ErrorCode::kInvalidArgument, "ticket {} of weight {} holds no buffer to release"_message, number.number,
         tessera::quoted(weights_[ticket.weight].name));
  Buffer& buffer = buffers_[ticket.buffer];
  buffer.holder = 0;
  buffer.last = std::move(last);
  buffer.released = ++releases_;
  pool.free.push_back(ticket.buffer);
  hold(pool, ticket, -1);
  if (buffer.captured == 0) kept_bytes_ -= pool.bytes;
  if (buffer.cleared) free_buffer(pool, ticket.buffer);
}

int64_t& BufferCache::written(BufferTicket ticket) {
  return buffers_[find(ticket).buffer].written;
}

bool BufferCache::holds(BufferTicket ticket) const {
  return holds(find(ticket), ticket.number);
}

void BufferCache::make_room(std::span<const BufferKey> keys, bool for_capture) {
  if (!cap_bytes_) return;
  const std::vector<uint32_t> wanted = want(keys);
  int64_t bytes = 0;
  for (const uint32_t index : wanted) {
    Pool& pool = pools_[index];
    if (for_capture) pool.wanted -= std::min(pool.wanted, captured_free(pool));
    bytes += pool.bytes * static_cast<int64_t>(pool.wanted - std::min(pool.wanted, spare(pool)));
  }
  make_room_for_wanted(bytes);
  for (const uint32_t index : wanted) pools_[index].wanted = 0;
}

bool BufferCache::fits_capture(std::span<const BufferKey> keys) {
  if (!cap_bytes_) return true;
  int64_t bytes = kept_bytes_;
  for (const uint32_t index : want(keys)) {
    Pool& pool = pools_[index];
    const size_t wanted = std::exchange(pool.wanted, 0);
    bytes += pool.bytes * static_cast<int64_t>(wanted - std::min(wanted, captured_free(pool)));
  }
  return bytes <= *cap_bytes_;
}

// Counts them in their pools, which it returns.
std::vector<uint32_t> BufferCache::want(std::span<const BufferKey> keys) {
  std::vector<uint32_t> wanted;
  for (const BufferKey& key : keys) {
    const uint32_t pool = pool_of(key);
    if (pools_[pool].wanted++ == 0) wanted.push_back(pool);
  }
  return wanted;
}

void BufferCache::make_room_for_wanted(int64_t bytes) {
  while (bytes > 0 && sums_.bytes + bytes > *cap_bytes_) {
    Pool* from = nullptr;
    uint32_t oldest = kNone;
    for (Pool& pool : pools_) {
      if (spare(pool) <= pool.wanted) continue;
      const uint32_t index = *std::ranges::find(pool.free, 0U, [this](uint32_t i) { return buffers_[i].captured; });
      if (buffers_[index].in_capture_pool) continue;
      if (from != nullptr && buffers_[oldest].released < buffers_[index].released) continue;
      from = &pool;
      oldest = index;
    }
    if (from == nullptr) return;
    free_buffer(*from, oldest);
  }
}

size_t BufferCache::spare(const Pool& pool) const {
  return static_cast<size_t>(std::ranges::count(pool.free, 0U, [this](uint32_t i) { return buffers_[i].captured; }));
}

int64_t BufferCache::end_step() {
  const int64_t before = sums_.bytes;
  for (Pool& pool : pools_) {
    for (const uint32_t index : std::vector(pool.free))
      if (!buffers_[index].used && !buffers_[index].in_capture_pool && buffers_[index].captured == 0)
        free_buffer(pool, index);
    for (const uint32_t index : pool.all) buffers_[index].used = buffers_[index].holder != 0;
  }
  return before - sums_.bytes;
}

void BufferCache::clear() {
  for (Ticket& ticket : tickets_) uncapture(ticket);
  for (Pool& pool : pools_) {
    for (const uint32_t index : std::vector(pool.free)) free_buffer(pool, index);
    for (const uint32_t index : pool.all) buffers_[index].cleared = true;
  }
}

void BufferCache::reallocate(BufferMemory pool_memory) {
  for (const Pool& pool : pools_) {
    if (pool.key.chain != Chain::kGraphed) continue;
    for (const uint32_t index : pool.all)
      if (const uint64_t holder = buffers_[index].holder; holder != 0)
        fail(ErrorCode::kInvalidArgument,
             "weight {} holds a graphed buffer ({}): buffers move to a capture pool only between steps"_message,
             tessera::quoted(weights_[tickets_[holder - 1].weight].name), to_string(pool.key));
  }
  for (const Ticket& ticket : tickets_)
    if (ticket.captured && pools_[ticket.pool].key.chain == Chain::kGraphed)
      fail(ErrorCode::kInvalidArgument,
           "weight {} is part of a capture, which has its address ({}): buffers move to a capture pool before "
           "anything is captured"_message,
           tessera::quoted(weights_[ticket.weight].name), to_string(pools_[ticket.pool].key));
  std::vector<std::pair<uint32_t, size_t>> counts;  // pool, buffers
  for (uint32_t i = 0; i < pools_.size(); ++i) {
    Pool& pool = pools_[i];
    if (pool.key.chain != Chain::kGraphed) continue;
    counts.emplace_back(i, pool.all.size());
    for (const uint32_t index : std::vector(pool.free)) free_buffer(pool, index);
  }
  capture_ = std::move(pool_memory);
  for (const auto& [i, count] : counts)
    for (size_t n = 0; n < count; ++n) pools_[i].free.push_back(allocate(pools_[i]));
}

CacheReport BufferCache::report() const {
  CacheReport report = sums_;
  for (const Pool& pool : pools_) {
    if (!pool.had_any) continue;
    const auto buffers = static_cast<int64_t>(pool.all.size());
    report.pools.push_back({.key = pool.key,
                            .buffers = buffers,
                            .held = buffers - static_cast<int64_t>(pool.free.size()),
                            .most_held = pool.most_held,
                            .bytes = buffers * pool.bytes});
  }
  for (const CacheReport::Weight& weight : weights_)
    if (weight.most_held_bytes > 0) report.weights.push_back(weight);
  return report;
}

const BufferCache::Ticket& BufferCache::find(BufferTicket ticket) const {
  if (ticket.number == 0 || ticket.number > tickets_.size())
    fail(ErrorCode::kInvalidArgument, "ticket {} is unknown: this cache has given out 1 to {}"_message, ticket.number,
         tickets_.size());
  return tickets_[ticket.number - 1];
}

BufferCache::Ticket& BufferCache::find(BufferTicket ticket) {
  return const_cast<Ticket&>(std::as_const(*this).find(ticket));
}

bool BufferCache::holds(const Ticket& ticket, uint64_t number) const {
  return ticket.buffer != kNone && buffers_[ticket.buffer].holder == number;
}

// A buffer of this pool that nobody holds; it is taken out of the free ones.
uint32_t BufferCache::choose(Pool& pool, const Ticket& ticket, bool for_capture) {
  const auto last_of = [&](bool captured) {
    const auto found = std::find_if(pool.free.rbegin(), pool.free.rend(),
                                    [&](uint32_t index) { return (buffers_[index].captured > 0) == captured; });
    return found == pool.free.rend() ? pool.free.end() : std::prev(found.base());
  };
  auto chosen = pool.free.end();
  if (ticket.captured) {
    chosen = std::ranges::find(pool.free, ticket.buffer);
    if (chosen == pool.free.end())
      fail_internal("weight {} is to be gathered where a capture has it, and something else is there",
                    tessera::quoted(weights_[ticket.weight].name));
  } else if (for_capture) {
    chosen = last_of(true);
  } else if (pool.key.chain == Chain::kGraphed) {
    chosen = std::ranges::find_if(
        pool.free, [&](uint32_t index) { return index == ticket.buffer && buffers_[index].captured == 0; });
  }
  if (chosen == pool.free.end()) chosen = last_of(false);
  if (chosen == pool.free.end()) {
    make_room({&pool.key, 1});
    return allocate(pool);
  }
  const uint32_t index = *chosen;
  pool.free.erase(chosen);
  return index;
}

uint32_t BufferCache::allocate(Pool& pool) {
  const bool capture = pool.key.chain == Chain::kGraphed && capture_.allocate != nullptr;
  Buffer buffer{.written = pool.bytes, .in_capture_pool = capture};
  pool.all.reserve(pool.all.size() + 1);
  pool.free.reserve(pool.all.capacity());
  if (vacant_.empty()) {
    buffers_.emplace_back();
    vacant_.push_back(static_cast<uint32_t>(buffers_.size() - 1));
    vacant_.reserve(buffers_.size());
  }
  buffer.memory = memory_of(buffer).allocate(pool.bytes);
  TESSERA_CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.memory) % kBufferAlignment, 0U);
  const uint32_t index = vacant_.back();
  vacant_.pop_back();
  buffers_[index] = std::move(buffer);
  pool.all.push_back(index);
  pool.had_any = true;
  ++sums_.allocations;
  sums_.bytes += pool.bytes;
  if (cap_bytes_ && sums_.bytes > *cap_bytes_) ++sums_.over_cap;
  sums_.most_bytes = std::max(sums_.most_bytes, sums_.bytes);
  sums_.chain_bytes.at(static_cast<size_t>(pool.key.chain)) += pool.bytes;
  log_event(spdlog::level::debug, "etp.buffer", {{"bytes", pool.bytes}}, "{}, buffer {} of its pool",
            to_string(pool.key), pool.all.size());
  return index;
}

void BufferCache::free_buffer(Pool& pool, uint32_t index) {
  Buffer& buffer = buffers_[index];
  memory_of(buffer).free(buffer.memory, pool.bytes, buffer.last);
  buffer = {};
  std::erase(pool.free, index);
  std::erase(pool.all, index);
  vacant_.push_back(index);
  ++sums_.frees;
  sums_.bytes -= pool.bytes;
  sums_.chain_bytes.at(static_cast<size_t>(pool.key.chain)) -= pool.bytes;
}

const BufferMemory& BufferCache::memory_of(const Buffer& buffer) const {
  return buffer.in_capture_pool ? capture_ : memory_;
}

void BufferCache::hold(const Pool& pool, const Ticket& ticket, int by) {
  CacheReport::Weight& weight = weights_[ticket.weight];
  weight.held_bytes += by * pool.bytes;
  weight.most_held_bytes = std::max(weight.most_held_bytes, weight.held_bytes);
  sums_.held_bytes += by * pool.bytes;
}

}  // namespace tessera::etp
