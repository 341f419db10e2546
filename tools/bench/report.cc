#include "tools/bench/report.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/config.h"
#include "base/process.h"
#include "tessera/version.h"
#include "tools/commit.h"

namespace tessera::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kDeathTarget = 1;  // seconds

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// What a case's rate is compared with.
struct Comparison {
  std::string with;             // "streaming_copy"
  std::optional<double> share;  // of its rate; unset if that is not known
};

// The case's rate; if `paced`, as a multiple of the copy's rate around that time, since shared machines change speed.
double paced_rate(const Report& report, const CaseResult& result, bool paced) {
  const double rate = rate_of(result.times.bytes_moved, result.times.seconds).median;
  return paced ? rate / rate_of(report.bytes, result.ceiling).median : rate;
}

Comparison compare(const Report& report, const CaseResult& result) {
  if (result.what.beside_plain)
    return {"the same without digests", median(result.times.plain_seconds) / median(result.times.seconds)};
  if (!result.what.baseline.empty()) {
    for (const CaseResult& other : report.cases) {
      if (other.what.name != result.what.baseline || !other.status.ok()) continue;
      const bool paced = other.what.memory == result.what.memory && !other.ceiling.empty() && !result.ceiling.empty();
      return {other.what.name, paced_rate(report, result, paced) / paced_rate(report, other, paced)};
    }
    return {result.what.baseline, {}};
  }
  const std::string name = result.what.memory == Memory::kShared ? "streaming_copy" : "process_vm_readv";
  if (result.ceiling.empty()) return {name, {}};
  return {name, paced_rate(report, result, true)};
}

std::string verdict(bool met) {
  return met ? "met" : "MISSED";
}

std::string size_text(int64_t bytes) {
  const bool whole = bytes % (int64_t{1} << 30) == 0;
  return whole ? fmt::format("{} GiB", bytes >> 30) : fmt::format("{} MiB", bytes >> 20);
}

// --- table

std::string ceiling_row(std::string_view name, int64_t bytes, const std::vector<double>& seconds) {
  if (seconds.empty()) return fmt::format("{:<46}{:>8}\n", name, "-");
  const Rate rate = rate_of(bytes, seconds);
  return fmt::format("{:<46}{:8.2f}{:8.2f}{:8.2f}\n", name, rate.median, rate.least, rate.most);
}

std::string case_row(const Report& report, const CaseResult& result) {
  const Case& what = result.what;
  if (!result.status.ok()) return fmt::format("{:<46}failed: {}\n", what.name, result.status.message());
  const Rate rate = rate_of(result.times.bytes_moved, result.times.seconds);
  const Comparison comparison = compare(report, result);
  std::string row = fmt::format("{:<46}{:8.2f}{:8.2f}{:8.2f}{:10.4f}{:10.4f}", what.name, rate.median, rate.least,
                                rate.most, result.times.first_seconds, result.times.register_seconds);
  row += comparison.share ? fmt::format("{:8.2f}", *comparison.share) : fmt::format("{:>8}", "-");
  if (what.target)
    row += fmt::format("{:8.2f}  {}", *what.target,
                       comparison.share ? verdict(*comparison.share >= *what.target)
                                        : fmt::format("unknown without {}", comparison.with));
  if (what.register_target_s)
    row += fmt::format("; registered in {:g} s: {}", *what.register_target_s,
                       verdict(result.times.register_seconds < *what.register_target_s));
  if (what.only_baseline) row += "; only because another case is compared with it";
  return row + "\n";
}

std::string transfer_table(const Report& report) {
  std::string text = fmt::format("\n{:<46}{:>8}{:>8}{:>8}\n", "ceiling", "GB/s", "min", "max");
  text += ceiling_row("streaming copy", report.bytes, report.streaming_copy);
  text += ceiling_row("process_vm_readv", report.bytes, report.process_vm_readv);
  text += fmt::format("\n{:<46}{:>8}{:>8}{:>8}{:>10}{:>10}{:>8}{:>8}\n", "transfer", "GB/s", "min", "max", "first s",
                      "regist. s", "share", "target");
  for (const CaseResult& result : report.cases) text += case_row(report, result);
  return text +
         "share: of the streaming copy for shared memory, of process_vm_readv for private memory, both measured just "
         "before and after; for small tensors, of the large rows-to-rows case; for "
         "sampled digests, of the same transfer without them, in turn\n";
}

std::string death_row(const DeathResult& death) {
  if (!death.status.ok()) return fmt::format("{:<46}failed: {}\n", to_string(death.victim), death.status.message());
  const double worst = *std::ranges::max_element(death.seconds);
  return fmt::format("{:<46}{:10.4f}{:10.4f}{:10.4f}{:10.2f}  {}\n", to_string(death.victim), median(death.seconds),
                     *std::ranges::min_element(death.seconds), worst, kDeathTarget, verdict(worst < kDeathTarget));
}

// As a multiple of what a process of the first crowd spends. Unset for the first crowd, and if that is not known.
std::optional<double> share_of_first(const Report& report, const CrowdResult& result) {
  const CrowdResult& first = report.crowds.front();
  if (&result == &first || !first.status.ok() || first.crowd.name != all_crowds().front().name) return std::nullopt;
  return median(result.times.cpu_seconds) / median(first.times.cpu_seconds);
}

std::string crowd_row(const Report& report, const CrowdResult& result) {
  const std::string& name = result.crowd.name;
  if (!result.status.ok()) return fmt::format("{:<46}failed: {}\n", name, result.status.message());
  const auto [least, most] = std::ranges::minmax_element(result.times.cpu_seconds);
  std::string row = fmt::format("{:<46}{:10.4f}{:10.4f}{:10.4f}{:10.2f}", name, median(result.times.cpu_seconds),
                                *least, *most, median(result.times.seconds));
  if (const auto share = share_of_first(report, result))
    row += fmt::format("{:8.2f}{:8.2f}  {}", *share, kCrowdTarget, verdict(*share <= kCrowdTarget));
  return row + "\n";
}

// --- JSON

Json json_of(const Rate& rate) {
  return {{"median", rate.median}, {"min", rate.least}, {"max", rate.most}};
}

Json json_of(const Machine& machine) {
  return {{"cpu", machine.cpu},       {"cpus", machine.cpus},
          {"kernel", machine.kernel}, {"memory_bytes", machine.memory_bytes},
          {"load", machine.load},     {"forced", machine.forced}};
}

Json ceiling_json(int64_t bytes, const std::vector<double>& seconds) {
  if (seconds.empty()) return nullptr;
  return {{"bytes", bytes}, {"seconds", seconds}, {"gigabytes_per_second", json_of(rate_of(bytes, seconds))}};
}

void add_measured(const Report& report, const CaseResult& result, Json& json) {
  const TransferTimes& times = result.times;
  json["bytes_moved"] = times.bytes_moved;
  json["bytes_lower_bound"] = times.bytes_lower_bound;
  json["register_seconds"] = times.register_seconds;
  json["first_seconds"] = times.first_seconds;
  json["seconds"] = times.seconds;
  if (result.what.beside_plain) json["plain_seconds"] = times.plain_seconds;
  json["gigabytes_per_second"] = json_of(rate_of(times.bytes_moved, times.seconds));
  json["ceiling_gigabytes_per_second"] =
      result.ceiling.empty() ? Json() : json_of(rate_of(report.bytes, result.ceiling));
  const auto [with, share] = compare(report, result);
  json["share_of"] = with;
  json["share"] = share ? Json(*share) : Json();
  if (result.what.target) json["met"] = share ? Json(*share >= *result.what.target) : Json();
  if (result.what.register_target_s) json["register_met"] = times.register_seconds < *result.what.register_target_s;
}

Json json_of(const TensorGroup& group) {
  return {{"src", group.src},
          {"dst", group.dst},
          {"shape", group.shape},
          {"tensors", group.tensors},
          {"src_dtype", to_string(group.src_dtype)},
          {"dst_dtype", to_string(group.dst_dtype)}};
}

const char* text_of(DigestMode digest) {
  if (digest == DigestMode::kSampled) return "sampled";
  return digest == DigestMode::kFull ? "full" : "off";
}

Json json_of(const Report& report, const CaseResult& result) {
  const Case& what = result.what;
  Json json{{"name", what.name},
            {"groups", Json::array()},
            {"memory", to_string(what.memory)},
            {"digest", text_of(what.digest)},
            {"only_baseline", what.only_baseline}};
  for (const TensorGroup& group : what.groups) json["groups"].push_back(json_of(group));
  if (what.target) json["target"] = *what.target;
  if (what.register_target_s) json["register_target_seconds"] = *what.register_target_s;
  if (result.status.ok()) {
    add_measured(report, result, json);
  } else {
    json["error"] = result.status.message();
  }
  return json;
}

Json json_of(const DeathResult& death) {
  Json json{{"name", to_string(death.victim)}, {"target_seconds", kDeathTarget}};
  if (!death.status.ok()) {
    json["error"] = death.status.message();
    return json;
  }
  json["seconds"] = death.seconds;
  json["median_seconds"] = median(death.seconds);
  json["met"] = *std::ranges::max_element(death.seconds) < kDeathTarget;
  return json;
}

Json json_of(const Report& report, const CrowdResult& result) {
  Json json{{"name", result.crowd.name}, {"world", result.crowd.world}, {"tensors", kCrowdTensors}};
  if (!result.status.ok()) {
    json["error"] = result.status.message();
    return json;
  }
  json["cpu_seconds_a_process"] = result.times.cpu_seconds;
  json["seconds"] = result.times.seconds;
  const auto share = share_of_first(report, result);
  if (!share) return json;
  json["times_the_first"] = *share;
  json["target"] = kCrowdTarget;
  json["met"] = *share <= kCrowdTarget;
  return json;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name") && line.find(':') != std::string::npos) return line.substr(line.find(':') + 2);
  return "unknown CPU";
}

}  // namespace

Machine this_machine() {
  Machine machine;
  machine.cpu = cpu_model();
  machine.cpus = usable_cpus();
  utsname system{};
  if (::uname(&system) == 0) machine.kernel = fmt::format("{} {}", system.sysname, system.release);
  machine.memory_bytes = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  ::getloadavg(&machine.load, 1);
  for (const EnvironmentVariable& variable : environment_variables())
    if (const std::string name(variable.name); name.starts_with("TESSERA_FORCE_"))
      if (const char* value = std::getenv(name.c_str()); value != nullptr && *value != '\0')
        machine.forced.push_back(fmt::format("{}={}", name, value));
  return machine;
}

Rate rate_of(int64_t bytes, std::vector<double> seconds) {
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  const auto [least, most] = std::ranges::minmax_element(seconds);
  const double slowest = gigabytes / *most, fastest = gigabytes / *least;
  return {gigabytes / median(std::move(seconds)), slowest, fastest};
}

Status Report::status() const {
  for (const CaseResult& result : cases)
    if (!result.status.ok()) return result.status;
  for (const CrowdResult& crowd : crowds)
    if (!crowd.status.ok()) return crowd.status;
  for (const DeathResult& death : deaths)
    if (!death.status.ok()) return death.status;
  return {};
}

std::string to_table(const Report& report) {
  const Machine& m = report.machine;
  std::string text =
      fmt::format("tessera {} at {}; {}, {} CPUs, {}, {}, load {:.2f}{}{}\n", kVersion, kCommit, m.cpu, m.cpus,
                  m.kernel, size_text(m.memory_bytes), m.load, m.forced.empty() ? "" : "; ", fmt::join(m.forced, ", "));
  text +=
      fmt::format("{} from {} processes to {}; everything, ceilings too, on CPUs {}; {} repetitions after a warm-up\n",
                  size_text(report.bytes), kSources, kDestinations, fmt::join(report.cpus, " and "), report.repeat);
  if (!report.cases.empty()) text += transfer_table(report);
  if (!report.crowds.empty())
    text += fmt::format("\n{:<46}{:>10}{:>10}{:>10}{:>10}{:>8}{:>8}\n",
                        fmt::format("CPU of a process that registers {} tensors", kCrowdTensors), "median s", "min",
                        "max", "all s", "times", "target");
  for (const CrowdResult& crowd : report.crowds) text += crowd_row(report, crowd);
  if (!report.deaths.empty())
    text += fmt::format("\n{:<46}{:>10}{:>10}{:>10}{:>10}\n", "noticing a death", "median s", "min", "max", "target");
  for (const DeathResult& death : report.deaths) text += death_row(death);
  return text;
}

std::string to_json(const Report& report) {
  Json json{{"version", kVersion},
            {"commit", kCommit},
            {"machine", json_of(report.machine)},
            {"bytes", report.bytes},
            {"repeat", report.repeat},
            {"sources", kSources},
            {"destinations", kDestinations},
            {"ceiling_threads", kCpus},
            {"pinned_to_cpus", report.cpus},
            {"ceilings",
             {{"streaming_copy", ceiling_json(report.bytes, report.streaming_copy)},
              {"process_vm_readv", ceiling_json(report.bytes, report.process_vm_readv)}}},
            {"cases", Json::array()},
            {"crowds", Json::array()},
            {"deaths", Json::array()}};
  for (const CaseResult& result : report.cases) json["cases"].push_back(json_of(report, result));
  for (const CrowdResult& crowd : report.crowds) json["crowds"].push_back(json_of(report, crowd));
  for (const DeathResult& death : report.deaths) json["deaths"].push_back(json_of(death));
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tessera::bench
