#include "base/log.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "base/escape.h"
#include "base/thread.h"

namespace tessera {
namespace {

// Bytes that must not reach a terminal or end a line, and some that may.
const std::string kHostile = "a\x1b[31m\r\nlevel=error \x9b \xff \xc2\x9b \xe2\x80\xae \"q\" \\ \xc3\xa9 \x01";

// Captures what log() writes while it lives, in the given form.
class Captured {
 public:
  explicit Captured(LogFormat format, LogLevel level = LogLevel::trace) : level_(log().level()) {
    auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(text_);
    sink->set_formatter(make_log_formatter(format));
    sinks_.push_back(std::move(sink));
    log().sinks().swap(sinks_);
    log().set_level(level);
  }
  ~Captured() {
    log().sinks().swap(sinks_);
    log().set_level(level_);
  }
  std::vector<std::string> lines() const {
    std::istringstream in(text_.str());
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }

 private:
  const LogLevel level_;
  std::ostringstream text_;
  std::vector<spdlog::sink_ptr> sinks_;
};

TEST(LogTest, EveryJsonLineParsesWhateverItHolds) {
  const Captured captured(LogFormat::kJson);
  log_event(LogLevel::info, "batch.sent",
            {{"job", kHostile}, {"rank", 3}, {"seconds", 0.25}, {"rate", std::numeric_limits<double>::infinity()}},
            "{} bytes", 17);
  log().warn("from {}", kHostile);
  ASSERT_EQ(captured.lines().size(), 2U);
  const auto event = nlohmann::json::parse(captured.lines()[0]);
  EXPECT_EQ(event["event"], "batch.sent");
  EXPECT_EQ(event["level"], "info");
  EXPECT_EQ(event["rank"], 3);
  EXPECT_EQ(event["seconds"], 0.25);
  EXPECT_TRUE(event["rate"].is_null());
  EXPECT_EQ(event["msg"], "17 bytes");
  const std::string job = event["job"];
  EXPECT_TRUE(job.starts_with("a\x1b[31m\r\nlevel=error ")) << "a parser gets what was sent";
  EXPECT_EQ(nlohmann::json::parse(captured.lines()[1])["level"], "warn");
}

TEST(LogTest, FloatsAreShortInEveryForm) {
  const std::pair<double, std::string> cases[] = {{0.16811388000000002, "0.168114"},
                                                  {0.1 + 0.2, "0.3"},
                                                  {1.0 / 3.0, "0.333333"},
                                                  {12345.678901, "12345.7"},
                                                  {1e-7 / 3.0, "3.33333e-08"},
                                                  {-2.5, "-2.5"},
                                                  {0.0, "0"},
                                                  {123456789.0, "1.23457e+08"}};
  for (const auto& [value, shown] : cases)
    for (const auto& [format, field] : {std::pair(LogFormat::kText, "seconds=" + shown + ":"),
                                        std::pair(LogFormat::kLogfmt, "seconds=" + shown + " "),
                                        std::pair(LogFormat::kJson, "\"seconds\":" + shown + ",")}) {
      const Captured captured(format);
      log_event(LogLevel::info, "x", {{"seconds", value}}, "text");
      EXPECT_NE(captured.lines().at(0).find(field), std::string::npos) << captured.lines().at(0);
    }
}

TEST(LogTest, NoLineHoldsAControlCharacter) {
  for (const LogFormat format : {LogFormat::kText, LogFormat::kLogfmt, LogFormat::kJson}) {
    const Captured captured(format);
    log_event(LogLevel::info, "x", {{"job", kHostile}}, "{}", kHostile);
    ASSERT_EQ(captured.lines().size(), 1U);
    const std::string line = captured.lines()[0];
    EXPECT_EQ(printable(line), line);
  }
}

// key=value pairs; values are bare or JSON strings.
std::map<std::string, std::string> parse_logfmt(const std::string& line) {
  std::map<std::string, std::string> pairs;
  static const std::regex pair(R"re(([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=]*)(?: |$))re");
  size_t at = 0;
  for (std::sregex_iterator it(line.begin(), line.end(), pair), end; it != end; ++it) {
    EXPECT_EQ(static_cast<size_t>(it->position()), at) << line;
    at += static_cast<size_t>(it->length());
    const std::string value = (*it)[2];
    pairs[(*it)[1]] = value.starts_with('"') ? nlohmann::json::parse(value).get<std::string>() : value;
  }
  EXPECT_EQ(at, line.size()) << line;
  return pairs;
}

TEST(LogTest, EveryLogfmtLineParses) {
  const Captured captured(LogFormat::kLogfmt);
  log_event(LogLevel::debug, "batch.sent", {{"job", "trainer"}, {"pair", "two words"}, {"version", -7}, {"empty", ""}});
  log().error("{}", kHostile);
  const auto event = parse_logfmt(captured.lines().at(0));
  EXPECT_EQ(event.at("job"), "trainer");
  EXPECT_EQ(event.at("pair"), "two words");
  EXPECT_EQ(event.at("version"), "-7");
  EXPECT_EQ(event.at("empty"), "");
  EXPECT_EQ(event.at("level"), "debug");
  EXPECT_FALSE(event.contains("msg"));
  EXPECT_EQ(parse_logfmt(captured.lines().at(1)).at("level"), "error");
}

TEST(LogTest, ATextLineSaysWhoWhatAndWhere) {
  const Captured captured(LogFormat::kText);
  start_thread("tessera-log", [] { log_event(LogLevel::info, "batch.sent", {{"rank", 3}}, "done"); }).join();
  log().info("plain");
  EXPECT_TRUE(std::regex_match(
      captured.lines().at(0),
      std::regex(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6} \d+/\d+ tessera-log info: batch\.sent rank=3: done)")))
      << captured.lines()[0];
  EXPECT_TRUE(captured.lines().at(1).ends_with(" info: plain")) << captured.lines()[1];
}

TEST(LogTest, ScopesLendTheirFieldsToTheLinesWithin) {
  const Captured captured(LogFormat::kJson);
  {
    const LogScope job({{"job", "trainer"}, {"rank", 1}});
    const LogScope batch({{"batch", "policy"}, {"rank", 2}});
    log().info("plain");
    log_event(LogLevel::info, "x", {{"batch", "own"}});
    start_thread("other", [] { log().info("elsewhere"); }).join();
  }
  log().info("after");
  const auto line = [&](size_t i) { return nlohmann::json::parse(captured.lines().at(i)); };
  EXPECT_EQ(line(0)["job"], "trainer");
  EXPECT_EQ(line(0)["rank"], 2) << "the inner scope's";
  EXPECT_EQ(line(1)["batch"], "own") << "the event's own";
  EXPECT_FALSE(line(2).contains("job")) << "a scope is its thread's";
  EXPECT_FALSE(line(3).contains("job"));
}

TEST(LogLimits, AFloodLeavesAFewLinesAPeriodAndTheNumberOfTheOthers) {
  FakeClock clock;
  LogLimits limits(clock);
  for (int i = 0; i < LogLimits::kMost; ++i) EXPECT_EQ(limits.admit("a"), 0);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(limits.admit("a"), std::nullopt);
  EXPECT_EQ(limits.admit("b"), 0) << "another event has lines of its own";
  clock.advance(LogLimits::kPeriod - std::chrono::nanoseconds(1));
  EXPECT_EQ(limits.admit("a"), std::nullopt);
  clock.advance(std::chrono::nanoseconds(1));
  EXPECT_EQ(limits.admit("a"), 1001);
  EXPECT_EQ(limits.admit("a"), 0);
}

TEST(LogLimits, ALineSaysHowManyWereWithheldBeforeIt) {
  const Captured captured(LogFormat::kLogfmt);
  while (LogLimits::process().admit("test.flood")) {
  }
  log_limited_event(LogLevel::warn, "test.flood", {{"peer", "x"}}, "line");
  EXPECT_TRUE(captured.lines().empty());
  log_limited_event(LogLevel::warn, "test.drop", {{"peer", "x"}}, "line {}", 1);
  ASSERT_EQ(captured.lines().size(), 1U);
  EXPECT_FALSE(parse_logfmt(captured.lines()[0]).contains("withheld"));
}

TEST(LogTest, BelowItsLevelNothingIsFormatted) {
  const Captured captured(LogFormat::kText, LogLevel::warn);
  log_event(LogLevel::info, "x", {});
  EXPECT_TRUE(captured.lines().empty());
}

TEST(EscapeTest, PrintableKeepsTextAndNamesTheRest) {
  EXPECT_EQ(printable("caf\xc3\xa9 \\ \"x\" \xf0\x9f\x9a\x80"), "caf\xc3\xa9 \\ \"x\" \xf0\x9f\x9a\x80");
  EXPECT_EQ(printable("\x1b[2J\n\x7f"), "\\x1b[2J\\x0a\\x7f");
  EXPECT_EQ(printable("\xc2\x9b\xe2\x80\xae"), "\\x9b\\u202e");
  // Bytes at which fmt's own quoting aborts: a surrogate, an overlong form, text that ends within a character.
  EXPECT_EQ(in_quotes("a\"\\ \xed\xa0\x80\xc0\x80\xc3"), R"("a\"\\ \xed\xa0\x80\xc0\x80\xc3")");
  // Overlong, a surrogate, beyond Unicode, cut short.
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xe2\x80"), "\\xe2\\x80");
}

TEST(EscapeTest, JsonStringsComeBackFromAnotherParser) {
  std::string all;
  for (int c = 0; c < 128; ++c) all += static_cast<char>(c);
  all += "\xc3\xa9\xe2\x80\xae\xf0\x9f\x9a\x80";
  std::string json;
  append_json_string(all, json);
  EXPECT_EQ(nlohmann::json::parse(json).get<std::string>(), all);
}

}  // namespace
}  // namespace tessera
