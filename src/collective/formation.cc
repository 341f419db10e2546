// How ranks come together: the bootstrap's blobs, then pages.
#include <unistd.h>

#include <algorithm>
#include <random>

#include "base/config.h"
#include "base/fail.h"
#include "collective/conditions.h"
#include "collective/group_impl.h"

namespace tessera::collective {
namespace {

uint64_t draw_key() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) & ~uint64_t{1};  // the next number is the bell page's
}

std::string host_name() {
  char name[kMaxNameBytes] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "(unknown host)";
}

void check_options(const GroupOptions& options) {
  if (options.size < 1 || options.size > kMaxRanks || options.rank < 0 || options.rank >= options.size)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': rank {} of {}: a group has 1 to {} ranks"_message,
                  options.name, options.rank, options.size, kMaxRanks);
  if (options.slots < 1 || options.slots > kMaxSlots)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': {} slots: a group has 1 to {}"_message, options.name,
                  options.slots, kMaxSlots);
  if (options.name.size() > kMaxNameBytes)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': the name has more than {} bytes"_message, options.name,
                  kMaxNameBytes);
  if (options.device == nullptr)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': it needs a device"_message, options.name);
}

std::string place_of(const Bootstrap& rank) {
  return fmt::format("rank {} (pid {} on {})", rank.rank, rank.process.pid, rank.host);
}

// `other` against rank 0: what all ranks must have in common.
void check_same(const Bootstrap& first, const Bootstrap& other, const std::string& group) {
  if (other.size != first.size || other.slots != first.slots || other.name != first.name ||
      other.in_process != first.in_process)
    tessera::fail(
        ErrorCode::kMismatch,
        "group '{}': {} forms '{}' of {} ranks with {} slots, {} forms '{}' of {} ranks with {} slots"_message, group,
        place_of(first), first.name, first.size, first.slots, place_of(other), other.name, other.size, other.slots);
  if (!other.process.same_host(first.process))
    tessera::fail(ErrorCode::kUnimplemented,
                  "group '{}': {} and {} are on different hosts: the ranks of an ETP group share the memory of one "
                  "host; put ETP inside a host and data parallelism across"_message,
                  group, place_of(first), place_of(other));
}

}  // namespace

Bootstrap Group::Impl::prepare() {
  check_options(options);
  traits_of(options.backend);
  key = draw_key();
  const size_t bytes = Page::bytes_for(options.slots);
  const size_t bell_bytes = Bells::bytes_for(options.size);
  memory.pages.resize(static_cast<size_t>(options.size));
  auto& own = memory.pages[static_cast<size_t>(options.rank)];
  if (alone_in_process()) {
    own = SharedPages::create_in_process(bytes, key);
    if (options.rank == 0) memory.bells = SharedPages::create_in_process(bell_bytes, key + 1);
  } else {
    own = SharedPages::create(bytes, SharedPages::Writers::kMaker);
    if (options.rank == 0) memory.bells = SharedPages::create(bell_bytes, SharedPages::Writers::kAll);
    service = std::make_unique<Service>(options.rank, options.size, arenas);
  }
  own_page = Page::create(own->data(), static_cast<uint32_t>(options.rank), static_cast<uint32_t>(options.size),
                          options.slots);
  return {.rank = static_cast<uint32_t>(options.rank),
          .size = static_cast<uint32_t>(options.size),
          .slots = options.slots,
          .name = options.name,
          .host = host_name(),
          .in_process = options.in_process,
          .process = Incarnation::self(),
          .recorder = options.device->recorder().rank(),
          .key = key,
          .socket = service == nullptr ? "" : service->socket()};
}

void Group::Impl::meet(const std::vector<std::string>& blobs) {
  if (blobs.size() != static_cast<size_t>(options.size))
    tessera::fail(ErrorCode::kMismatch, "group '{}': the bootstrap returned {} blobs, the group has {} ranks"_message,
                  options.name, blobs.size(), options.size);
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (blobs[rank].size() > kMaxBootstrapBytes)
      tessera::fail(ErrorCode::kInvalidArgument,
                    "group '{}': the blob of rank {} has {} bytes, at most {} are taken"_message, options.name, rank,
                    blobs[rank].size(), kMaxBootstrapBytes);
    const std::string what = fmt::format("group '{}': blob of rank {}", options.name, rank);
    ranks.push_back(read_message<Bootstrap>(std::as_bytes(std::span(blobs[rank])), what));
    if (ranks.back().rank != rank)
      tessera::fail(ErrorCode::kMismatch,
                    "{} comes from rank {}: the bootstrap must return blobs in rank order"_message, what,
                    ranks.back().rank);
  }
  for (const Bootstrap& other : ranks) check_same(ranks.front(), other, options.name);
  if (ranks[static_cast<size_t>(options.rank)].key != key)
    tessera::fail(ErrorCode::kMismatch, "group '{}': the bootstrap returned another blob for this rank, {}"_message,
                  options.name, options.rank);
}

void Group::Impl::find_pages() {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    auto& pages_of = memory.pages[rank];
    if (pages_of == nullptr) pages_of = SharedPages::find(ranks[rank].key);
    if (pages_of == nullptr)
      tessera::fail(ErrorCode::kPeerLost, "group '{}': rank {} has given up"_message, options.name, rank);
  }
  if (memory.bells == nullptr) memory.bells = SharedPages::find(ranks.front().key + 1);
  if (memory.bells == nullptr)
    tessera::fail(ErrorCode::kPeerLost, "group '{}': rank {} has given up"_message, options.name, 0);
}

void Group::Impl::connect() {
  service->start(ranks, memory, [this](const Status& status) { fail(status); });
  const OwnCondition connected(
      fmt::format("all ranks of group '{}'", options.name),
      [this] {
        failure.require_none();
        return service->connected();
      },
      [this](const auto& ready, const Deadline& until) { service->sleep_until(ready, until); },
      [this] { return service->explain(); });
  options.device->wait_host(connected, Deadline::after(options.timeout));
  memory = service->pages();
}

void Group::Impl::open_pages() {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const SharedPages& pages_of = *memory.pages[rank];
    pages.push_back(Page::open(pages_of.data(), pages_of.bytes(), static_cast<uint32_t>(rank), ranks[rank].size,
                               options.slots, describe(static_cast<int>(rank))));
    seen.push_back(std::make_unique<SeenWords>(options.slots));
  }
  seen_states = std::vector<std::atomic<RankState>>(ranks.size());
  bells = std::make_unique<Bells>(memory.bells, options.rank, options.size);
  opened.store(true, std::memory_order_release);
  calls = std::make_unique<Calls>(
      CallRoom{.pages = pages,
               .rank = options.rank,
               .ring = [this] { ring(); },
               .await = [this](uint64_t step, const auto& what, auto timeout) { await_step(step, what, timeout); },
               .fail = [this](const Status& status) { fail(status); },
               .describe = [this](int rank) { return describe(rank); }});
}

void Group::Impl::await_all(RankState state, const Deadline& deadline) {
  page(options.rank).set_state(state);
  ring();
  const auto late = [this, state] {
    std::vector<int> ranks_behind;
    for (int rank = 0; rank < options.size; ++rank)
      if (page(rank).state() < state) ranks_behind.push_back(rank);
    return ranks_behind;
  };
  const OwnCondition reached(
      fmt::format("all ranks of group '{}' to {} it", options.name, state == RankState::kLeft ? "leave" : "form"),
      [&] {
        look();
        failure.require_none();
        return late().empty();
      },
      [this](const auto& ready, const Deadline& until) { bells->wait(ready, until); }, [&] { return explain(late()); });
  options.device->wait_host(reached, deadline);
}

std::shared_ptr<Group> Group::form(const Exchange& exchange, const GroupOptions& options) {
  Config::require_valid();
  auto impl = std::make_unique<Impl>(options);
  const std::vector<std::byte> blob = message_bytes(impl->prepare());
  impl->meet(exchange({reinterpret_cast<const char*>(blob.data()), blob.size()}));
  try {
    impl->alone_in_process() ? impl->find_pages() : impl->connect();
    impl->open_pages();
    impl->await_all(RankState::kHere, Deadline::after(options.timeout));
  } catch (const Error& error) {
    impl->fail({error.code(), error.what()});
    throw;
  }
  std::vector<Incarnation> processes;
  for (const Bootstrap& rank : impl->ranks) processes.push_back(rank.process);
  impl->readers = std::make_shared<Readers>(options.rank, impl->memory.pages, impl->pages, std::move(processes));
  return std::shared_ptr<Group>(new Group(std::move(impl)));
}

}  // namespace tessera::collective
