// Compares PyTorch's own layouts, written by scripts/torch_layout_table.py, with ours. Does not need torch.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/layout.h"

namespace tessera {
namespace {

struct TorchLayout {
  std::string shape;
  std::string layout;
  std::vector<std::string> ranks;  // in the mesh's row-major order: local shape, then owned intervals of each dim
};

std::vector<TorchLayout> read_table() {
  std::ifstream file(TESSERA_LAYOUT_TESTDATA "/torch_layouts.tsv");
  std::vector<TorchLayout> table;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream fields(line);
    TorchLayout& entry = table.emplace_back();
    std::getline(fields, entry.shape, '\t');
    std::getline(fields, entry.layout, '\t');
    for (std::string field; std::getline(fields, field, '\t');) entry.ranks.push_back(field);
  }
  return table;
}

TEST(TorchTableTest, EveryRankHoldsWhatDTensorGivesIt) {
  const std::vector<TorchLayout> table = read_table();
  ASSERT_GE(table.size(), 400U) << "is src/layout/testdata/torch_layouts.tsv whole?";
  for (const TorchLayout& entry : table) {
    const Shape shape = parse_shape(entry.shape);
    const Layout layout = Layout::parse(entry.layout).bind(shape);
    ASSERT_EQ(entry.ranks.size(), static_cast<size_t>(layout.mesh().size())) << entry.layout;
    for (size_t i = 0; i < entry.ranks.size(); ++i) {
      const Rank rank = layout.mesh().ranks()[i];
      const Region owned = layout.owned(shape, rank);
      const std::string ours =
          to_string_shape(layout.local_shape(shape, rank)) + (shape.empty() ? "" : owned.to_string());
      EXPECT_EQ(ours, entry.ranks[i]) << entry.layout << " on " << entry.shape << ", rank " << rank;
    }
  }
}

TEST(TorchTableTest, CoversTheHardCases) {
  int nested = 0;
  int strided = 0;
  int scattered = 0;
  int empty_local = 0;
  int scalars = 0;
  for (const TorchLayout& entry : read_table()) {
    nested += entry.layout.find("S0,S0") != std::string::npos;
    strided += entry.layout.find('*') != std::string::npos;
    scattered += entry.layout.find('@') != std::string::npos;
    empty_local += !entry.ranks.empty() && entry.ranks.back().find("[]") != std::string::npos;
    scalars += entry.shape == "scalar";
  }
  EXPECT_GE(nested, 80);
  EXPECT_GE(strided, 200);
  EXPECT_GE(scattered, 40);
  EXPECT_GE(empty_local, 100);
  EXPECT_GE(scalars, 10);
}

}  // namespace
}  // namespace tessera
