#include <memory>

#include "base/message.h"
#include "bus/registration/match.h"
#include "bus/registration/records.h"
#include "fuzz/targets.h"
#include "tessera/store.h"

namespace tessera::fuzz {
namespace {

using namespace bus;

constexpr std::string_view kKey = "a key";

template <typename Record>
Record check_record(std::string_view value) {
  const auto read = [](std::string_view bytes) { return read_record<Record>(kKey, bytes); };
  const auto write = [](const Record& record) { return write_record(record); };
  Record record = read(value);
  expect_round_trip(record, read, write);
  return record;
}

// A manifest matches itself, as the only one of its job and as both sides'.
void check_manifest(const Manifest& manifest) {
  TESSERA_CHECK(ManifestDiff::between(manifest, manifest).empty());
  const std::vector<ManifestDiff> alone(1);
  accepts([&] { match(*merge("a", std::make_shared<const Manifest>(manifest), alone), "a", manifest, "b"); });
}

void check_pair_key(std::string_view key) {
  const std::string prefix = pair_prefix("ns", "weights");
  const JobRank parsed = parse_pair_key(prefix, prefix + std::string(key));
  TESSERA_CHECK(parsed.rank >= 0);
  const JobRank again = parse_pair_key(prefix, pair_key("ns", "weights", parsed.job, parsed.rank));
  TESSERA_CHECK(again.job == parsed.job && again.rank == parsed.rank);
}

}  // namespace

bool records(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    const char kind = in.get<char>();
    const std::string_view value = as_text(in.rest());
    switch (kind) {
      case 'r':
        check_record<RankRecord>(value);
        return;
      case 'p':
        check_record<PairRecord>(value);
        return;
      case 'm':
        return check_manifest(check_record<ManifestRecord>(value).manifest);
      case 'b':
        check_record<BatchRecord>(value);
        return;
      case 'f':
        check_record<FailureRecord>(value);
        return;
      case 'n':
        check_record<RenewalRecord>(value);
        return;
      case 's':
        check_record<GatheredRecord>(value);
        return;
      case 'g':
        record_registration(kKey, value);
        return;
      case 'k':
        return check_pair_key(value);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  });
}

}  // namespace tessera::fuzz
