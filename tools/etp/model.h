// The weights of a model, as `tessera etp` reads them from a file, and what the schedule makes of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "etp/schedule/forecast.h"
#include "etp/schedule/gather_cost.h"
#include "tessera/checkpoint.h"
#include "tools/layout_rules.h"

namespace tessera::tools {

struct ListedWeight {
  TensorInfo tensor;
  std::optional<etp::WeightFormat> format = std::nullopt;
};

// `path` is a checkpoint (a .safetensors file, an index, or a folder), whose weights come in the natural order of their
// names ("layers.2" before "layers.10"), or else a list in the order of use: a line "NAME ROWS COLUMNS DTYPE [FORMAT]"
// for each weight; empty lines and what follows a '#' do not count. Throws Error(kInvalidArgument) that names file and
// line, or as Checkpoint::open() does.
std::vector<ListedWeight> read_model(const std::filesystem::path& path);

// `REGEX=FORMAT`, tried in order; the first rule whose regex (RE2) matches the whole name wins.
class WeightFormatRules {
 public:
  // Throws Error(kInvalidArgument) that names the rule.
  static WeightFormatRules parse(std::span<const std::string> rules);
  std::optional<etp::WeightFormat> find(std::string_view name) const;

 private:
  std::vector<std::pair<NameFilter, etp::WeightFormat>> rules_{};
};

struct EtpModelOptions {
  int ranks = 1;
  int64_t pad_for_alignment = 16;
  int64_t min_elements = 2048;                // smaller ones are replicated
  std::optional<DType> dtype = std::nullopt;  // that GEMMs compute in; by default each weight's own
};

struct EtpModel {
  std::vector<std::string> names{};  // of sharded weights, in order of use
  std::vector<etp::GatherCost> costs{};
  std::vector<etp::ForecastWeight> weights{};  // an expert stack is several
  etp::BufferKeys keys{};
  int64_t replicated = 0;  // tensors
  int64_t replicated_bytes = 0;
};

// Matrices are sharded, and stacks [E, F, K] as lists of E experts; tensors of other dims, small ones and those of
// dtypes that no GEMM takes are replicated. A weight's format is the first rule's, else the list's, else the compute
// dtype.
EtpModel shard_model(std::span<const ListedWeight> listed, const WeightFormatRules& rules,
                     const EtpModelOptions& options);

}  // namespace tessera::tools
