#include "collective/group.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/fail.h"
#include "collective/conditions.h"
#include "collective/group_impl.h"
#include "tessera/memory.h"

namespace tessera::collective {

Group::Group(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Group::~Group() {
  if (!impl_->process.here()) std::ignore = impl_.release();  // a forked child has neither the thread nor the pages
}

Group::Impl::~Impl() {
  if (!closed) abandon();
  if (service != nullptr) service->stop();
}

void Group::Impl::abandon() {
  if (!own_page) return;
  const std::optional<Status> refusal = calls == nullptr ? std::nullopt : calls->last_refusal();
  if (own_page->state() == RankState::kFinal && !refusal) {
    own_page->set_state(RankState::kLeft);  // its runtime has ended in good order, and others may read on
  } else if (failure.set(refusal ? *refusal
                                 : failed(ErrorCode::kPeerLost,
                                          "rank {} (pid {}) has dropped group '{}' without close()"_message,
                                          options.rank, ::getpid(), options.name))) {
    own_page->set_failure(failure.status());
  }
  if (memory.bells != nullptr) Bells(memory.bells, options.rank, options.size).ring_sleepers();
}

// Failure ------------------------------------------------------------------------------------------------------------

std::string Group::Impl::describe(int rank) const {
  return fmt::format("rank {} (pid {})", rank, ranks[static_cast<size_t>(rank)].process.pid);
}

std::string Group::Impl::describe_state(int rank) const {
  const RankState state = page(rank).state();
  std::string text = describe(rank);
  if (state == RankState::kFailed) return text + " has failed";
  if (state == RankState::kLeft) return text + " has left";
  if (options.in_process) return text + " has not come so far";
  return text + (stopped(rank) ? " is stopped" : " is running");
}

bool Group::Impl::stopped(int rank) const {
  return !options.in_process && rank != options.rank && is_stopped(ranks[static_cast<size_t>(rank)].process);
}

void Group::Impl::fail(const Status& status) {
  if (!failure.set(status)) return;
  own_page->set_failure(status);
  if (opened.load(std::memory_order_acquire)) {
    bells->ring_sleepers();
    bells->ring_own();
  }
  if (service != nullptr) service->wake();
}

void Group::Impl::fail_for(int rank, const Status& status) {
  fail(Status(status.code(), fmt::format("{}: {}", describe(rank), status.message())));
  failure.require_none();
  fail_internal("a group has failed without a failure");
}

void Group::Impl::look() {
  if (failure.failed() || !process.here()) return;
  for (int rank = 0; rank < options.size; ++rank) {
    // In this order: what another thread has seen by now is seen here, too.
    std::atomic<RankState>& seen_state = seen_states[static_cast<size_t>(rank)];
    RankState before = seen_state.load(std::memory_order_acquire);
    const RankState state = page(rank).state();
    if (state == RankState::kFailed) fail(page(rank).failure(describe(rank)));
    if (state < before)
      fail(failed(ErrorCode::kDataLoss, "{}: its state says {} after {}"_message, describe(rank),
                  static_cast<uint64_t>(state), static_cast<uint64_t>(before)));
    while (before < state && !seen_state.compare_exchange_weak(before, state, std::memory_order_acq_rel)) {
    }
  }
}

void Group::Impl::require_open() const {
  failure.require_none();
  if (closed)
    tessera::fail(ErrorCode::kCancelled, "group '{}': rank {} has closed it"_message, options.name, options.rank);
}

void Group::Impl::require_usable() const {
  require_open();
  process.require("group");
}

void Group::Impl::check_rank(int rank) const {
  if (rank < 0 || rank >= options.size)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': rank {} of {}"_message, options.name, rank, options.size);
}

void Group::Impl::ring() {
  bells->ring_sleepers();
}

void Group::claim() {
  if (impl_->claimed.exchange(true))
    tessera::fail(ErrorCode::kInvalidArgument,
                  "group '{}' has served a runtime, whose versions its words still show: form one for each"_message,
                  name());
}

void Group::fail(const Status& status) {
  impl_->fail(status);
}

Status Group::status() const {
  impl_->look();
  return impl_->failure.status();
}

bool Group::is_final(int rank) const {
  impl_->process.require("group");
  const RankState state = impl_->page(rank).state();
  return rank != impl_->options.rank && (state == RankState::kFinal || state == RankState::kLeft);
}

void Group::require_present(int rank) const {
  impl_->look();
  impl_->require_open();
  if (!is_final(rank)) return;
  // It may have told why before it went.
  if (const std::optional<Status> refusal = impl_->calls->refused_next()) {
    impl_->fail(*refusal);
    impl_->failure.require_none();
  }
  const bool left = impl_->page(rank).state() == RankState::kLeft;
  const std::string who = describe(rank);
  const std::string waits = describe(this->rank());
  impl_->fail(
      left ? failed(ErrorCode::kPeerLost, "group '{}': {} has left it, and {} waits for it"_message, name(), who, waits)
           : failed(ErrorCode::kPeerLost, "group '{}': {} has closed its runtime or ended, and {} waits for it"_message,
                    name(), who, waits));
  impl_->failure.require_none();
}

void Group::finish() {
  if (impl_->closed || !impl_->process.here() || impl_->failure.failed()) return;
  impl_->page(impl_->options.rank).set_state(RankState::kFinal);
  impl_->ring();
}

std::shared_ptr<const void> Group::reading() const {
  if (!impl_->process.here()) return nullptr;
  const MutexLock lock(impl_->reading_mutex);
  std::shared_ptr<const void> token = impl_->reading.lock();
  if (token == nullptr) {
    token = std::shared_ptr<const void>(impl_->readers.get(),
                                        [readers = impl_->readers](const void*) { readers->tell_done(); });
    impl_->reading = token;
  }
  return token;
}

std::shared_ptr<const Readers> Group::readers() const {
  return impl_->readers;
}

void Group::close(const Deadline& deadline) {
  if (impl_->closed || !impl_->process.here()) return;
  impl_->look();
  const bool failed = impl_->failure.failed();
  try {
    if (!failed) impl_->await_all(RankState::kLeft, deadline);
  } catch (...) {
    impl_->closed = true;
    if (impl_->service != nullptr) impl_->service->stop();
    throw;
  }
  impl_->closed = true;
  if (impl_->service != nullptr) impl_->service->stop();
}

// Facts --------------------------------------------------------------------------------------------------------------

int Group::rank() const {
  return impl_->options.rank;
}
int Group::size() const {
  return impl_->options.size;
}
const std::string& Group::name() const {
  return impl_->options.name;
}
Duration Group::timeout() const {
  return impl_->options.timeout;
}
uint32_t Group::slots() const {
  return impl_->options.slots;
}
device::Device& Group::device() const {
  return *impl_->options.device;
}
BackendTraits Group::backend() const {
  BackendTraits traits = traits_of(impl_->options.backend);
  traits.needs_matched_order |= impl_->options.matched_order;
  return traits;
}
std::string Group::describe(int rank) const {
  impl_->check_rank(rank);
  return impl_->describe(rank);
}

std::string Group::explain(std::span<const int> ranks) const {
  return impl_->explain(ranks);
}

std::string Group::Impl::explain(std::span<const int> late) const {
  std::vector<std::string> states;
  for (const int rank : late)
    if (rank != options.rank) states.push_back(describe_state(rank));
  // A rank may be late because it waits for one that is stopped.
  for (int rank = 0; rank < options.size; ++rank)
    if (std::ranges::find(late, rank) == late.end() && stopped(rank)) states.push_back(describe_state(rank));
  return fmt::format("{}", fmt::join(states, ", "));
}

void Group::sleep_until(const std::function<bool()>& ready, const Deadline& deadline) const {
  impl_->bells->wait(ready, deadline);
}

// Words --------------------------------------------------------------------------------------------------------------

void Group::set(Word word, uint32_t slot, uint64_t value) {
  set(word, {&slot, 1}, {&value, 1});
}

void Group::set(Word word, std::span<const uint32_t> slots, std::span<const uint64_t> values) {
  store(word, slots, values);
  if (!device().recorder().on()) return;
  std::vector<device::WordEdge> words;
  for (size_t i = 0; i < slots.size(); ++i) words.push_back(edge(rank(), word, slots[i], values[i]));
  note_words(words, {});
}

void Group::note_words(std::span<const device::WordEdge> words, std::string_view subject) const {
  constexpr size_t kAtATime = 1024;
  for (; !words.empty(); words = words.subspan(std::min(kAtATime, words.size())))
    device().recorder().word_write(words.first(std::min(kAtATime, words.size())), subject);
}

void Group::store(Word word, uint32_t slot, uint64_t value) {
  store(word, {&slot, 1}, {&value, 1});
}

void Group::store(Word word, std::span<const uint32_t> slots, std::span<const uint64_t> values) {
  impl_->require_open();
  TESSERA_CHECK_EQ(slots.size(), values.size());
  const Page& own = *impl_->own_page;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!own.has(word, slots[i]))
      tessera::fail(ErrorCode::kInvalidArgument, "group '{}': no word '{}' of slot {}: it has {} slots"_message, name(),
                    to_string(word), slots[i], own.slots());
    std::atomic<uint64_t>& place = own.word(word, slots[i]);
    const uint64_t before = place.load(std::memory_order_relaxed);
    if (values[i] < before || values[i] > kMaxWordValue)
      tessera::fail(ErrorCode::kInvalidArgument, "group '{}': word '{}' of slot {} cannot go from {} to {}"_message,
                    name(), to_string(word), slots[i], before, values[i]);
    place.store(values[i], std::memory_order_seq_cst);
  }
  impl_->ring();
}

device::WordEdge Group::edge(int rank, Word word, uint32_t slot, uint64_t value) const {
  impl_->check_rank(rank);
  constexpr int kWordBits = 35;  // of a group's words; what is left tells groups from each other
  const uint64_t of_group = static_cast<uint64_t>(word) << 32 | slot;
  return {.rank = impl_->ranks[static_cast<size_t>(rank)].recorder,
          .word = impl_->ranks.front().key << kWordBits | of_group,
          .value = value};
}

void Group::note_words() const {
  const Page& own = *impl_->own_page;
  std::vector<device::WordEdge> words;
  const auto note = [&](Word word, uint32_t slot) {
    const uint64_t value = own.word(word, slot).load(std::memory_order_relaxed);
    if (value > 0) words.push_back(edge(rank(), word, slot, value));
  };
  for (uint32_t slot = 0; slot < slots(); ++slot)
    for (const Word word : {Word::kPublished, Word::kProduced, Word::kFolded}) note(word, slot);
  for (const Word word : {Word::kRetired, Word::kClosed, Word::kLeftPlan}) note(word, kWholeRank);
  note_words(words, name());
}

uint64_t Group::key() const {
  return impl_->ranks.front().key;
}

uint64_t Group::get(int rank, Word word, uint32_t slot) const {
  impl_->require_open();
  impl_->check_rank(rank);
  const Page& page = impl_->page(rank);
  if (!page.has(word, slot))
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': no word '{}' of slot {}: it has {} slots"_message, name(),
                  to_string(word), slot, page.slots());
  // In this order: what another thread has seen by now is seen here, too.
  std::atomic<uint64_t>& seen = impl_->seen[static_cast<size_t>(rank)]->of(word, slot);
  uint64_t before = seen.load(std::memory_order_acquire);
  const uint64_t value = page.word(word, slot).load(std::memory_order_seq_cst);
  if (value == before) return value;
  if (value < before || value > kMaxWordValue)
    impl_->fail_for(rank, failed(ErrorCode::kDataLoss, "its word '{}' of slot {} says {} after {}"_message,
                                 to_string(word), slot, value, before));
  while (before < value && !seen.compare_exchange_weak(before, value, std::memory_order_acq_rel)) {
  }
  return value;
}

void Group::distrust(int rank, Word word, uint32_t slot, std::string_view because) const {
  const uint64_t value = impl_->page(rank).word(word, slot).load(std::memory_order_relaxed);
  impl_->fail_for(rank, failed(ErrorCode::kDataLoss, "its word '{}' of slot {} says {}, which cannot be: {}"_message,
                               to_string(word), slot, value, because));
}

std::shared_ptr<const device::Condition> Group::at_least(int rank, Word word, uint32_t slot, uint64_t value,
                                                         std::string what) const {
  return std::make_shared<ReachedCondition>(shared_from_this(), std::vector{rank}, word, slot, value, std::move(what));
}

std::shared_ptr<const device::Condition> Group::all_at_least(Word word, uint32_t slot, uint64_t value,
                                                             std::string what) const {
  std::vector<int> others;
  for (int other = 0; other < size(); ++other)
    if (other != rank()) others.push_back(other);
  return std::make_shared<ReachedCondition>(shared_from_this(), std::move(others), word, slot, value, std::move(what));
}

// Calls --------------------------------------------------------------------------------------------------------------

void Group::Impl::await_step(uint64_t step, const std::string& what, std::optional<Duration> timeout) {
  const auto late = [this, step] {
    std::vector<int> missing;
    for (int rank = 0; rank < options.size; ++rank)
      if (page(rank).step().load(std::memory_order_seq_cst) < step) missing.push_back(rank);
    return missing;
  };
  // A rank that has got this step may have thrown what it says, and have dropped the group: others are to find the same
  // in it.
  const auto require_usable_for_step = [&] {
    try {
      require_usable();
    } catch (const Error&) {
      if (!late().empty()) throw;
    }
  };
  const OwnCondition mailed(
      fmt::format("all ranks of group '{}' to call {}", options.name, what),
      [&] {
        require_usable_for_step();
        for (int rank = 0; rank < options.size; ++rank) {
          // Read first: a rank that has left may have made this call before.
          const bool left = page(rank).state() == RankState::kLeft;
          const uint64_t reached = page(rank).step().load(std::memory_order_seq_cst);
          if (reached >= step + kMails)
            fail_for(rank, failed(ErrorCode::kDataLoss, "its mail says step {} after {}"_message, reached, step));
          if (reached >= step) continue;
          look();
          require_usable_for_step();
          if (page(rank).step().load(std::memory_order_seq_cst) >= step) continue;
          if (left)
            tessera::fail(ErrorCode::kPeerLost, "group '{}': {} has left it, and was wanted for {}"_message,
                          options.name, describe(rank), what);
          return false;
        }
        return true;
      },
      [this](const auto& ready, const Deadline& until) { bells->wait(ready, until); }, [&] { return explain(late()); });
  try {
    options.device->wait_host(mailed, Deadline::after(timeout.value_or(options.timeout)));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeadlineExceeded || error.code() == ErrorCode::kPeerLost)
      fail({error.code(), error.what()});
    throw;
  }
}

uint64_t Group::Impl::call(const Call& call, const TakeMail& take) {
  require_usable();
  Leftovers::of_process().free_unread();
  const uint64_t number = calls->run(call, take, Deadline::after(options.timeout));
  options.device->recorder().collective(options.name, static_cast<uint32_t>(options.size), number,
                                        to_string(call.kind));
  return number;
}

std::vector<std::string> Group::exchange(std::string_view what, std::string blob, std::optional<Duration> timeout) {
  if (blob.size() > kMaxBlobBytes)
    tessera::fail(ErrorCode::kInvalidArgument, "exchange '{}': {} bytes, at most {} are taken"_message, what,
                  blob.size(), kMaxBlobBytes);
  std::vector<std::string> blobs(static_cast<size_t>(size()));
  const Call call{.kind = CallKind::kExchange,
                  .what = what,
                  .bytes = std::as_bytes(std::span(blob)),
                  .most_bytes = kMaxBlobBytes,
                  .timeout = timeout};
  impl_->call(call, [&](int from, uint64_t, std::span<const std::byte> bytes) {
    blobs[static_cast<size_t>(from)].append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return blobs;
}

void Group::max_exchange(std::span<float> values) {
  const auto bytes = std::as_writable_bytes(values);
  const Call call{.kind = CallKind::kMax, .bytes = bytes, .equal_sizes = true, .most_bytes = bytes.size()};
  impl_->call(call, [&](int from, uint64_t offset, std::span<const std::byte> theirs) {
    float* const out = values.data() + offset / sizeof(float);
    for (size_t i = 0; i < theirs.size() / sizeof(float); ++i) {
      float value = 0;
      std::memcpy(&value, theirs.data() + i * sizeof(float), sizeof(value));
      if (from == 0 || value > out[i] || (std::isnan(value) && !std::isnan(out[i]))) out[i] = value;
    }
  });
}

void Group::refuse(std::string_view what, const Status& reason, bool forwarded) {
  if (reason.ok())
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': a refusal of '{}' without an error"_message, name(), what);
  impl_->require_usable();
  impl_->calls->refuse(what, reason, forwarded, Deadline::after(timeout()));
}

void Group::hear_refusal() {
  if (const std::optional<Status> refusal = impl_->calls->hear()) refusal->throw_if_error();
}

std::vector<int> Group::called_next(std::span<const int> ranks) const {
  std::vector<int> found(ranks.begin(), ranks.end());
  std::erase_if(found, [this](int rank) { return !impl_->calls->has_called_next(rank); });
  return found;
}

void Group::refuse_difference(int rank, const std::string& waits) const {
  impl_->calls->refuse_difference(rank, waits).throw_if_error();
}

uint64_t Group::refusals() const {
  return impl_->calls->refusals();
}

std::optional<Group::Refusal> Group::latest_refusal() const {
  const std::optional<Calls::Refusal> latest = impl_->calls->latest();
  if (!latest) return std::nullopt;
  return Refusal{.reason = latest->reason, .own = latest->own};
}

void Group::barrier(std::string_view what) {
  impl_->call({.kind = CallKind::kBarrier, .what = what, .equal_sizes = true}, [](int, uint64_t, auto) {});
}

}  // namespace tessera::collective
