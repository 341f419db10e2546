#include "tools/job_options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "base/clock.h"
#include "base/fail.h"
#include "tools/list_option.h"

namespace tessera::tools {
namespace {

constexpr double kMaxTimeoutSeconds = 30.0 * 24 * 3600;

}  // namespace

void JobOptions::declare(CLI::App& command) {
  command.add_option("--store", store,
                     "Store where the jobs meet: auto or tcp://HOST:PORT (default: TESSERA_STORE, else auto)");
  command.add_option("--namespace", name_space,
                     "Name of this run among those that share the store (default: TESSERA_NAMESPACE, else 'default')");
  command.add_option(
      "--agent", agent,
      "Who moves the data: embedded (threads of this process) or daemon (the `tessera agent` of this rank) "
      "(default: TESSERA_AGENT)");
  command.add_option("--job", job, "Name of this job")->required();
  command.add_option("--peer", peer, "Name of the other job")->required();
  command.add_option("--pair", pair, "Name under which the two jobs meet")->capture_default_str();
  command.add_option("--rank", rank, "Rank of this process in its job, from 0 (default: from the launcher, else 0)");
  command.add_option("--world", world, "Number of processes of this job (default: from the launcher, else 1)");
  add_list(command, "--layout", layouts,
           "REGEX=LAYOUT: layout of tensors whose whole name matches; the first match wins; repeatable. A layout is "
           "AXES@RANKS:PLACEMENTS, e.g. dp=2,tp=4@0-7:R,S1")
      ->required();
  add_list(command, "--wire", wires,
           "FORMAT, or REGEX=FORMAT: quantise all tensors, or those whose whole name matches, on their way, to nvfp4, "
           "mxfp8, "
           "... or none; the first match wins; repeatable; either side may ask. Only floats of 2 dims or more are "
           "quantised");
  command.add_option("--timeout", timeout_s,
                     "Seconds to wait for the other job, and for each transfer (default: 300 and 30)");
  command.add_option("--threads", threads,
                     "Number of copy threads (default: usable CPUs divided by the ranks on this machine)");
  auto* mode = command
                   .add_option("--digest", digest,
                               "What to check of what arrives: full, sampled (one block in sixteen, others in each "
                               "version) or off; the weaker choice of the two jobs holds")
                   ->capture_default_str();
  command.add_flag("--no-digest", no_digest, "The same as --digest off")->excludes(mode);
  command.add_flag("--pinned", pinned,
                   "Refuse the other job if it comes back with another world size or other layouts");
  command.add_flag("--delta", delta,
                   "Send only what changed since the last version, where that is smaller; both sides must ask for it");
  command.add_flag("--json", json, "Print one JSON object at the end");
}

BusOptions JobOptions::bus() const {
  BusOptions options;
  options.job = job;
  const Place place = own_place(rank, world, ::getenv);
  options.rank = place.rank;
  options.world = place.world;
  if (threads < 0) fail(ErrorCode::kInvalidArgument, "--threads {}: give 1 or more"_message, threads);
  options.store = store;
  options.agent = agent;
  options.name_space = name_space;
  options.threads = threads;
  options.digest = no_digest ? DigestMode(DigestMode::kOff) : DigestMode::parse(digest);
  return options;
}

PairOptions JobOptions::pair_options() const {
  return {.name = pair, .peer = peer, .timeout = rendezvous_timeout()};
}

Timeout JobOptions::rendezvous_timeout() const {
  if (!timeout_s) return kRendezvousTimeout;
  if (!(*timeout_s > 0) || *timeout_s > kMaxTimeoutSeconds)
    fail(ErrorCode::kInvalidArgument, "--timeout {}: give seconds, more than 0 and at most {}"_message, *timeout_s,
         kMaxTimeoutSeconds);
  return seconds(*timeout_s);
}

Timeout JobOptions::transfer_timeout() const {
  return timeout_s ? rendezvous_timeout() : kTransferTimeout;
}

}  // namespace tessera::tools
