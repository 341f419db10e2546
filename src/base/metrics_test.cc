#include "base/metrics.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

namespace tessera {
namespace {

struct Family {
  std::string type, help;
  std::map<std::string, double> series;  // by suffix and labels
};

// Parses the exposition format by its grammar; every line must conform.
std::map<std::string, Family> parse(const std::string& text) {
  static const std::regex help(R"(# HELP ([a-z_]+) (.+))"), type(R"(# TYPE ([a-z_]+) (counter|gauge|histogram))"),
      sample(R"re(([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+\})? (-?[0-9.e+-]+))re");
  std::map<std::string, Family> families;
  std::string family;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    std::smatch match;
    if (std::regex_match(line, match, help)) {
      family = match[1];
      EXPECT_TRUE(families.try_emplace(family, Family{.type = "", .help = match[2], .series = {}}).second) << line;
    } else if (std::regex_match(line, match, type)) {
      EXPECT_EQ(match[1], family);
      families[family].type = match[2];
    } else if (std::regex_match(line, match, sample)) {
      const std::string name = match[1];
      EXPECT_TRUE(name.starts_with(family)) << line;
      const std::string key = name.substr(family.size()) + match[2].str();
      EXPECT_TRUE(families[family].series.emplace(key, std::stod(match[3])).second) << line;
    } else {
      ADD_FAILURE() << "not of the format: " << line;
    }
  }
  return families;
}

TEST(MetricsTest, WhatIsCountedIsShownUnderItsLabels) {
  Metrics metrics;
  metrics.transfers(TransferSide::kReceive, Outcome::kFailed).add(3);
  metrics.bytes(TransferSide::kSend).add(uint64_t{1} << 40);
  metrics.quantize_seconds(QuantizePhase::kAgree).observe(seconds(2));
  metrics.connections.add(2);
  metrics.connections.add(-5);
  const auto families = parse(metrics.exposition());
  const Family& transfers = families.at("tessera_transfers_total");
  EXPECT_EQ(transfers.type, "counter");
  EXPECT_EQ(transfers.series.at(R"({side="receive",outcome="failed"})"), 3);
  EXPECT_EQ(transfers.series.at(R"({side="send",outcome="done"})"), 0) << "a series is there before its first event";
  EXPECT_EQ(families.at("tessera_transferred_bytes_total").series.at(R"({side="send"})"), 1099511627776.0);
  const Family& quantising = families.at("tessera_quantize_seconds");
  EXPECT_EQ(quantising.series.at(R"(_sum{phase="agree"})"), 2);
  EXPECT_EQ(quantising.series.at(R"(_count{phase="encode"})"), 0);
  EXPECT_EQ(families.at("tessera_connections").series.at(""), -3);
}

TEST(MetricsTest, AHistogramsBucketsAreCumulativeAndBoundsInclusive) {
  Metrics metrics;
  for (const double s : {0.0, 1e-4, 2e-4, 0.1, 1000.0}) metrics.registration_seconds.observe(seconds(s));
  const Family family = parse(metrics.exposition()).at("tessera_registration_seconds");
  EXPECT_EQ(family.series.at(R"(_bucket{le="0.0001"})"), 2);
  EXPECT_EQ(family.series.at(R"(_bucket{le="0.00025"})"), 3);
  EXPECT_EQ(family.series.at(R"(_bucket{le="100"})"), 4);
  EXPECT_EQ(family.series.at(R"(_bucket{le="+Inf"})"), 5);
  EXPECT_EQ(family.series.at("_count"), 5);
  EXPECT_NEAR(family.series.at("_sum"), 1000.1003, 1e-9);
  EXPECT_EQ(family.series.size(), DurationHistogram::kBounds.size() + 3);
}

TEST(MetricsTest, ABatchHasASeriesWhileItLivesAndThereIsRoom) {
  Metrics metrics;
  std::list<Metrics::Batch> batches;
  for (size_t i = 0; i <= Metrics::kMostBatches; ++i)
    batches.emplace_back(metrics, "weights", "b" + std::to_string(i), TransferSide::kSend).set_version(7);
  EXPECT_EQ(parse(metrics.exposition()).at("tessera_batch_version").series.size(), Metrics::kMostBatches);
  EXPECT_EQ(
      parse(metrics.exposition()).at("tessera_batch_version").series.at(R"({pair="weights",batch="b0",side="send"})"),
      7);
  batches.clear();
  EXPECT_TRUE(parse(metrics.exposition()).at("tessera_batch_version").series.empty());
}

// One connect() for each engine: their batches differ in nothing but the peer.
TEST(MetricsTest, BatchesOfOneNameShareASeries) {
  Metrics metrics;
  std::list<Metrics::Batch> batches;
  for (const int64_t version : {3, 8, 5})
    batches.emplace_back(metrics, "weights", "policy", TransferSide::kSend).set_version(version);
  const std::string text = metrics.exposition();
  const std::string series = R"(tessera_batch_version{pair="weights",batch="policy",side="send"} )";
  const size_t first = text.find(series);
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.substr(first + series.size(), 2), "8\n");
  EXPECT_EQ(text.find(series, first + 1), std::string::npos);
}

TEST(MetricsTest, LabelsAreEscaped) {
  Metrics metrics;
  const Metrics::Batch batch(metrics, "a\"b", "c\\d\ne", TransferSide::kReceive);
  EXPECT_TRUE(parse(metrics.exposition())
                  .at("tessera_batch_version")
                  .series.contains(R"({pair="a\"b",batch="c\\d\ne",side="receive"})"));
}

TEST(MetricsTest, NoCountIsLostBetweenThreads) {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; ++i) {
        metrics.commands.add();
        metrics.registration_seconds.observe(seconds(1));
        if (i % 1000 == 0) metrics.exposition();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(metrics.commands.value(), 40'000U);
  EXPECT_EQ(parse(metrics.exposition()).at("tessera_registration_seconds").series.at("_count"), 40'000);
}

// "side, outcome": the names of the labels of a family's series, or of a cell on the page, which may list values in
// parentheses.
std::string label_names(const Family& family) {
  static const std::regex label(R"re(([a-z]+)="(?:[^"\\]|\\.)*")re");
  std::string names;
  const std::string series = family.series.empty() ? std::string() : family.series.begin()->first;
  for (std::sregex_iterator at(series.begin(), series.end(), label), end; at != end; ++at)
    if ((*at)[1] != "le") names += (names.empty() ? "" : ", ") + (*at)[1].str();
  return names.empty() ? "-" : names;
}
std::string label_names(const std::string& cell) {
  static const std::regex values(R"( \([^)]*\))");
  return std::regex_replace(cell, values, "");
}

// docs/metrics.md has a row for each family: | `name` | type | labels | meaning |.
TEST(MetricsTest, TheDocumentedTableIsTheCodes) {
  std::ifstream page(TESSERA_METRICS_PAGE);
  ASSERT_TRUE(page) << TESSERA_METRICS_PAGE;
  static const std::regex row(R"(\| `(tessera_[a-z_]+)` \| (\w+) \| (.*) \| (.*) \|)");
  std::map<std::string, Family> documented;
  std::map<std::string, std::string> labels;
  std::smatch match;
  for (std::string line; std::getline(page, line);)
    if (std::regex_match(line, match, row)) {
      documented[match[1]] = {.type = match[2], .help = match[4], .series = {}};
      labels[match[1]] = label_names(match[3].str());
    }
  Metrics metrics;
  const Metrics::Batch batch(metrics, "weights", "policy", TransferSide::kSend);
  const auto families = parse(metrics.exposition());
  for (const auto& [name, family] : families) {
    ASSERT_TRUE(documented.contains(name)) << name << " is not in docs/metrics.md";
    EXPECT_EQ(documented[name].type, family.type) << name;
    EXPECT_EQ(documented[name].help, family.help) << name;
    EXPECT_EQ(labels[name], label_names(family)) << name;
  }
  for (const auto& [name, row_of_page] : documented)
    EXPECT_TRUE(families.contains(name)) << name << " is counted no more";
}

}  // namespace
}  // namespace tessera
