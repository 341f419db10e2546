#include "transport/transport.h"

#include <algorithm>

#include "base/config.h"
#include "base/escape.h"
#include "base/fail.h"
#include "transport/loopback/transport.h"
#include "transport/optional.h"
#include "transport/shm/transport.h"
#include "transport/testing/transport.h"

namespace tessera {
namespace {

// "testing" of "testing:7".
std::string_view forced_name() {
  const std::string_view forced = Config::get().force_transport;
  return forced.substr(0, forced.find(':'));
}

}  // namespace

const TransportRegistry& TransportRegistry::builtin() {
  static const TransportRegistry registry = [] {
    std::vector<const Transport*> transports{&loopback_transport(), &shm_transport(), &cuda_ipc_transport(),
                                             &ucx_transport(), &nccl_transport()};
    const std::string_view forced = forced_name();
    if (forced == testing_transport().name()) transports.push_back(&testing_transport());
    return TransportRegistry(std::move(transports));
  }();
  return registry;
}

const Transport* TransportRegistry::find(std::string_view name) const {
  const auto found = std::ranges::find(transports_, name, &Transport::name);
  return found == transports_.end() ? nullptr : *found;
}

const Transport& TransportRegistry::choose(const Endpoint& src, const Endpoint& dst) const {
  return best(src, dst, false);
}

Streams::Ends TransportRegistry::make_stream(const Endpoint& src, const Endpoint& dst) const {
  const Transport& transport = streaming(src, dst);
  Streams::Ends ends = transport.streams()->make();
  ends.producer.transport = ends.consumer.transport = transport.name();
  return ends;
}

std::unique_ptr<ByteStream> TransportRegistry::open_stream(StreamEnd end, const Endpoint& src, const Endpoint& dst,
                                                           std::string_view owner) const {
  const Transport* const transport = find(end.transport);
  if (transport == nullptr || transport->streams() == nullptr || transport->score(src, dst) <= 0)
    fail(ErrorCode::kInvalidArgument, "stream of {}: {} has none from {} to {}"_message, owner,
         in_quotes(end.transport), src.process.to_string(), dst.process.to_string());
  return transport->streams()->open(std::move(end), owner);
}

std::vector<std::unique_ptr<Consent>> TransportRegistry::consents() const {
  std::vector<std::unique_ptr<Consent>> consents;
  for (const Transport* transport : transports_)
    if (std::unique_ptr<Consent> consent = transport->consent()) consents.push_back(std::move(consent));
  return consents;
}

const Transport& TransportRegistry::best(const Endpoint& src, const Endpoint& dst, bool streams) const {
  const bool forced = !forced_name().empty() && (streams || !src.process.same_process(dst.process));
  const Transport* best = nullptr;
  int best_score = 0;
  for (const Transport* transport : transports_) {
    const int score = transport->score(src, dst);
    if (forced && transport->name() != forced_name()) continue;
    if (score <= best_score || (streams && transport->streams() == nullptr)) continue;
    best = transport;
    best_score = score;
  }
  if (best != nullptr) return *best;
  std::string lacks;
  for (const Transport* transport : transports_)
    lacks += fmt::format("; {}: {}", transport->name(), transport->capability().detail);
  fail(ErrorCode::kUnimplemented, "no transport from {} ({}, {} memory) to {} ({}, {} memory){}"_message, src.name,
       src.process.to_string(), to_string(src.device), dst.name, dst.process.to_string(), to_string(dst.device), lacks);
}

void require_forced_transport() {
  if (forced_name().empty() || TransportRegistry::builtin().find(forced_name()) != nullptr) return;
  std::vector<std::string_view> names;
  for (const Transport* transport : TransportRegistry::builtin().transports()) names.push_back(transport->name());
  fail(ErrorCode::kInvalidArgument,
       "TESSERA_FORCE_TRANSPORT is {}, which is no transport: unset it, or give one of {}"_message,
       in_quotes(Config::get().force_transport), fmt::join(names, ", "));
}

std::optional<Access> forced_access() {
  const std::string& forced = Config::get().force_pull;
  if (forced.empty()) return {};
  if (forced == "readv") return Access::kGet;
  if (forced == "stream") return Access::kStream;
  fail(ErrorCode::kInvalidArgument, "TESSERA_FORCE_PULL is \"{}\": it must be readv or stream"_message, forced);
}

}  // namespace tessera
