#include "tools/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

namespace tessera::tools {
namespace {

using ::testing::HasSubstr;

TEST(FormatBytes, ShowsThreeDigitsAndADecimalUnit) {
  const std::pair<int64_t, const char*> cases[] = {
      {0, "0 B"},
      {999, "999 B"},
      {1000, "1.00 kB"},
      {9994, "9.99 kB"},
      {9996, "10.0 kB"},
      {99'960, "100 kB"},
      {999'400, "999 kB"},
      {999'500, "1.00 MB"},
      {90'868'376, "90.9 MB"},
      {1'200'000'000, "1.20 GB"},
      {INT64_MAX, "9.22 EB"},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(format_bytes(bytes), text);
}

TEST(ProgressLine, ShowsShareBytesAndRate) {
  const Progress half{.bytes_done = 1'300'000'000, .bytes_total = 2'600'000'000, .seconds = 0.5};
  EXPECT_EQ(progress_line("recv weights", half, 71),
            "recv weights [==========>         ]  50%  1.30 GB of 2.60 GB  2.60 GB/s");
  const Progress all{.bytes_done = 10, .bytes_total = 10, .seconds = 1};
  EXPECT_THAT(progress_line("r", all, 80), HasSubstr("[==============================] 100%"));
}

TEST(ProgressLine, NeverExceedsItsColumns) {
  for (size_t columns = 0; columns < 120; ++columns)
    for (const int64_t done : {int64_t{0}, int64_t{1}, int64_t{500'000}, int64_t{1'000'000}}) {
      const Progress progress{.bytes_done = done, .bytes_total = 1'000'000, .seconds = 1};
      EXPECT_LE(progress_line("send weights/3", progress, columns).size(), columns);
    }
}

TEST(ProgressLine, SaysThatItWaitsUntilDataFlows) {
  EXPECT_EQ(progress_line("recv w", {}, 80), "recv w  waiting for the other job");
}

TEST(ProgressBar, WritesPlainLinesWhereThereIsNoTerminal) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = ::open_memstream(&text, &size);
  {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
    ProgressBar bar("recv w", file.get());
    bar.show({.bytes_done = 5, .bytes_total = 10, .seconds = 1});
    bar.show({});
    EXPECT_GE(bar.interval(), std::chrono::seconds(1));
    std::rewind(file.get());
    for (int c = std::fgetc(file.get()); c != EOF; c = std::fgetc(file.get())) std::fputc(c, stream);
  }
  std::fclose(stream);
  const std::string written(text, size);
  std::free(text);
  EXPECT_THAT(written, HasSubstr(" 50%  5 B of 10 B"));
  EXPECT_EQ(std::ranges::count(written, '\n'), 2);
  EXPECT_EQ(written.find('\033'), std::string::npos);
}

}  // namespace
}  // namespace tessera::tools
