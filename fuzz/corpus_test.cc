// Replays the corpora in fuzz/corpus/ in every build, so that each sanitizer sees them. A target aborts if a reader
// breaks a promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "bus/lending/messages.h"
#include "bus/prepare/amax_messages.h"
#include "bus/session/versions.h"
#include "fuzz/seeds.h"
#include "fuzz/targets.h"
#include "peer/exchange/messages.h"
#include "peer/handshake.h"
#include "peer/report.h"
#include "store/protocol.h"

namespace tessera::fuzz {
namespace {

// By file name.
std::map<std::string, std::string> corpus_of(std::string_view target) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(TESSERA_CORPUS) / target)) {
    std::ostringstream bytes;
    bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    files.emplace(entry.path().filename().string(), bytes.str());
  }
  return files;
}

Input input_of(const std::string& bytes) {
  return std::as_bytes(std::span(bytes));
}

const Target& target_of(std::string_view name) {
  const auto* found = std::ranges::find(kTargets, name, &Target::name);
  TESSERA_CHECK(found != std::end(kTargets));
  return *found;
}

class Corpus : public testing::TestWithParam<Target> {};

TEST_P(Corpus, IsReadWithoutABrokenPromise) {
  const auto files = corpus_of(GetParam().name);
  EXPECT_FALSE(files.empty());
  for (const auto& [name, bytes] : files) {
    SCOPED_TRACE(name);
    GetParam().run(input_of(bytes));
    for (size_t cut = bytes.size() < 2048 ? 0 : bytes.size(); cut < bytes.size(); ++cut)
      GetParam().run(input_of(bytes).first(cut));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Corpus, testing::ValuesIn(kTargets),
                         [](const auto& target) { return std::string(target.param.name); });

TEST(Seeds, AreCommittedAsTheWritersWriteThemAndAreAllTaken) {
  std::map<std::string, std::set<std::string>> names;
  for (const Seed& seed : seeds()) {
    SCOPED_TRACE(seed.target + "/" + seed.name);
    EXPECT_TRUE(names[seed.target].insert(seed.name).second);
    EXPECT_TRUE(target_of(seed.target).run(input_of(seed.bytes)));
    const auto files = corpus_of(seed.target);
    const auto file = files.find(seed.name);
    EXPECT_TRUE(file != files.end() && file->second == seed.bytes)
        << "the format has changed: bump its version if a release has it, then run scripts/fuzz.sh --seeds";
  }
  for (const auto& [target, expected] : names)
    for (const auto& [name, bytes] : corpus_of(target))
      EXPECT_TRUE(!name.starts_with("seed-") || expected.contains(name))
          << target << "/" << name << " is written no more";
}

TEST(Seeds, HoldEveryTypeOfMessage) {
  std::set<std::string> bus_names;
  for (const Seed& seed : seeds())
    if (seed.target == "bus") bus_names.insert(seed.name);
  const auto expect_seed = [&]<typename Message>() {
    EXPECT_TRUE(bus_names.contains(fmt::format("seed-{}", kNameOf<Message::kType>))) << kNameOf<Message::kType>;
  };
  HandshakeMessages::each(expect_seed);
  ExchangeMessages::each(expect_seed);
  bus::VersionMessages::each(expect_seed);
  bus::AmaxMessages::each(expect_seed);
  ReportMessages::each(expect_seed);
  bus::LendingMessages::each(expect_seed);
}

}  // namespace
}  // namespace tessera::fuzz
