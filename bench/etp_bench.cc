// What Extended Tensor Parallelism costs and reaches, in one table, with ceilings of the same run:
//
//   build/cpu/bin/etp_bench [SECTION...]     gather fold latency list overlap consumption count checker; default: all
//
// bench/README.md says what the rows are. Takes a minute or two.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "bench/etp/rows.h"
#include "tessera/error.h"

namespace tessera::bench {
namespace {

struct Section {
  std::string_view name;
  void (*add_rows)(Table&);
};
constexpr Section kSections[] = {{"gather", gather_rows}, {"fold", fold_rows},       {"latency", latency_rows},
                                 {"list", list_rows},     {"overlap", overlap_rows}, {"consumption", consumption_rows},
                                 {"count", count_rows},   {"checker", checker_rows}};

int run(const std::vector<std::string_view>& wanted) {
  for (const std::string_view name : wanted)
    if (std::ranges::find(kSections, name, &Section::name) == std::ranges::end(kSections)) {
      fmt::print(stderr, "etp_bench: there is no section '{}'\n", name);
      return 2;
    }
  Table table;
  for (const Section& section : kSections)
    if (wanted.empty() || std::ranges::find(wanted, section.name) != wanted.end()) section.add_rows(table);
  table.foot();
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("tessera-etp-bench." + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
  ::setenv("TESSERA_RUNTIME_DIR", folder.c_str(), 1);
  int status = 1;
  try {
    status = tessera::bench::run({argv + 1, argv + argc});
  } catch (const tessera::Error& error) {
    fmt::print(stderr, "etp_bench: {}\n", error.what());
  }
  std::filesystem::remove_all(folder);
  return status;
}
