#include "base/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "tessera/version.h"

namespace tessera {
namespace {

constexpr std::string_view kSides[] = {"send", "receive"};
constexpr std::string_view kOutcomes[] = {"done", "failed", "cancelled"};
constexpr std::string_view kQuantizePhases[] = {"amax", "agree", "encode"};

std::string label(std::string_view name, std::string_view value) {
  std::string escaped;
  for (const char c : value) {
    if (c == '\\' || c == '"') escaped += '\\';
    if (c == '\n')
      escaped += "\\n";
    else
      escaped += c;
  }
  return fmt::format("{}=\"{}\"", name, escaped);
}

// Writes families one after another, each as a head and its series.
class Exposition {
 public:
  Exposition& family(std::string_view name, std::string_view type, std::string_view help) {
    name_ = name;
    fmt::format_to(out(), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
    return *this;
  }
  template <typename Value>
  Exposition& add(const Value& value, std::string_view labels = {}, std::string_view suffix = {}) {
    const std::string braced = labels.empty() ? std::string() : fmt::format("{{{}}}", labels);
    fmt::format_to(out(), "{}{}{} {}\n", name_, suffix, braced, value);
    return *this;
  }
  Exposition& add(const DurationHistogram& histogram, const std::string& labels = {}) {
    const std::string comma = labels.empty() ? "" : ",";
    uint64_t count = 0;
    for (size_t i = 0; i <= DurationHistogram::kBounds.size(); ++i) {
      count += histogram.bucket(i);
      const bool last = i == DurationHistogram::kBounds.size();
      add(count, labels + comma + label("le", last ? "+Inf" : fmt::format("{}", DurationHistogram::kBounds[i])),
          "_bucket");
    }
    add(histogram.sum(), labels, "_sum");
    return add(count, labels, "_count");
  }
  void counter(std::string_view name, std::string_view help, const Counter& counter) {
    family(name, "counter", help).add(counter.value());
  }
  void gauge(std::string_view name, std::string_view help, const Gauge& gauge) {
    family(name, "gauge", help).add(gauge.value());
  }
  std::string take() { return fmt::to_string(text_); }

 private:
  std::back_insert_iterator<fmt::memory_buffer> out() { return std::back_inserter(text_); }

  fmt::memory_buffer text_;
  std::string_view name_;
};

}  // namespace

void DurationHistogram::observe(Duration duration) {
  const auto bound = std::ranges::lower_bound(kBounds, to_seconds(duration));
  buckets_[static_cast<size_t>(bound - kBounds.begin())].fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add(duration.count(), std::memory_order_relaxed);
}

Outcome outcome_of(const Status& status) {
  if (status.ok()) return Outcome::kDone;
  return status.code() == ErrorCode::kCancelled ? Outcome::kCancelled : Outcome::kFailed;
}

Metrics& Metrics::process() {
  static auto* const metrics = new Metrics;  // leaked on purpose: threads may count while statics are destroyed
  return *metrics;
}

Metrics::Batch::Batch(Metrics& metrics, std::string_view pair, std::string_view batch, TransferSide side)
    : metrics_(metrics),
      labels_(fmt::format("{},{},{}", label("pair", pair), label("batch", batch), label("side", kSides[index(side)]))) {
  const MutexLock lock(metrics_.mutex_);
  if (metrics_.batches_.size() < kMostBatches) metrics_.batches_.push_back(this);
}

Metrics::Batch::~Batch() {
  const MutexLock lock(metrics_.mutex_);
  metrics_.batches_.remove(this);
}

std::string Metrics::exposition() const {
  Exposition out;
  out.family("tessera_build_info", "gauge", "1; the release that runs").add(1, label("release", kVersion));
  out.family("tessera_transfers_total", "counter", "Sends and receives that ended, by outcome");
  for (size_t side = 0; side < std::size(kSides); ++side)
    for (size_t outcome = 0; outcome < std::size(kOutcomes); ++outcome)
      out.add(transfers_[side][outcome].value(),
              fmt::format("{},{}", label("side", kSides[side]), label("outcome", kOutcomes[outcome])));
  out.family("tessera_transferred_bytes_total", "counter",
             "Bytes of tensors given to receivers, or taken from senders");
  for (size_t side = 0; side < std::size(kSides); ++side) out.add(bytes_[side].value(), label("side", kSides[side]));
  out.family("tessera_transfer_seconds", "histogram", "From the call to the end of a send or receive that succeeded");
  for (size_t side = 0; side < std::size(kSides); ++side) out.add(seconds_[side], label("side", kSides[side]));
  out.family("tessera_quantize_seconds", "histogram", "Phases of quantising sent tensors, if they succeeded");
  for (size_t phase = 0; phase < std::size(kQuantizePhases); ++phase)
    out.add(quantize_seconds_[phase], label("phase", kQuantizePhases[phase]));
  out.counter("tessera_quantized_source_bytes_total", "Bytes of quantised tensors, before", quantized_source_bytes);
  out.counter("tessera_quantized_bytes_total", "Bytes of quantised tensors, after: codes, scales and amaxes",
              quantized_bytes);
  out.counter("tessera_encoded_bytes_total",
              "Bytes of tensors that were quantised before they were sent: codes, scales and amaxes, only copied",
              encoded_bytes);
  out.family("tessera_registrations_total", "counter", "Registrations of batches that ended, by outcome");
  for (size_t outcome = 0; outcome < std::size(kOutcomes); ++outcome)
    out.add(registrations_[outcome].value(), label("outcome", kOutcomes[outcome]));
  out.family("tessera_registration_seconds", "histogram", "From the call to the end of a registration that succeeded");
  out.add(registration_seconds);
  out.family("tessera_batch_version", "gauge",
             "Version last sent, or held; the newest of batches of one name; for at most 64 batches");
  {
    const MutexLock lock(mutex_);
    std::map<std::string_view, int64_t> versions;
    for (const Batch* batch : batches_) {
      int64_t& newest = versions.try_emplace(batch->labels_, 0).first->second;
      newest = std::max<int64_t>(newest, batch->version_.value());
    }
    for (const auto& [labels, version] : versions) out.add(version, labels);
  }
  out.counter("tessera_versions_offered_total", "Versions offered to receivers", versions_offered);
  out.counter("tessera_versions_withdrawn_total", "Versions withdrawn before a rank began to take them",
              versions_withdrawn);
  out.counter("tessera_versions_committed_total", "Staged versions committed", versions_committed);
  out.counter("tessera_versions_aborted_total", "Staged versions that no rank committed", versions_aborted);
  out.counter("tessera_versions_undecided_total", "Staged versions whose decision the store could not tell",
              versions_undecided);
  out.counter("tessera_digest_mismatches_total", "Routes whose bytes differ at the two ends", digest_mismatches);
  out.gauge("tessera_sessions", "Sessions with other jobs", sessions);
  out.counter("tessera_sessions_lost_total", "Sessions that ended because a peer died, failed or left", sessions_lost);
  out.gauge("tessera_waits", "Waits for ranks to join, to register or to attach", waits);
  out.counter("tessera_messages_malformed_total", "Connections and links closed because of malformed messages",
              messages_malformed);
  out.counter("tessera_connections_refused_total", "Callers that were refused", connections_refused);
  out.gauge("tessera_connections", "Connections to other agents, both directions", connections);
  out.counter("tessera_commands_total", "Commands taken from the command queue", commands);
  out.counter("tessera_store_requests_total", "Requests to the store", store_requests);
  out.counter("tessera_store_reconnects_total", "Connections to the store after one was lost", store_reconnects);
  out.gauge("tessera_shared_memory_bytes", "Bytes of shared memory of this process and of its worker or agent",
            shared_memory_bytes);
  return out.take();
}

}  // namespace tessera
