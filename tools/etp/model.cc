#include "tools/etp/model.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "base/escape.h"
#include "base/fail.h"
#include "layout/text_reader.h"

namespace tessera::tools {
namespace {

constexpr size_t kMaxWeights = 1'000'000;
constexpr int64_t kMaxDim = int64_t{1} << 32;
constexpr int64_t kMaxExperts = 65'536;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Runs of digits compare as numbers.
bool naturally_less(std::string_view a, std::string_view b) {
  while (!a.empty() && !b.empty()) {
    if (!is_digit(a.front()) || !is_digit(b.front())) {
      if (a.front() != b.front()) return a.front() < b.front();
      a.remove_prefix(1);
      b.remove_prefix(1);
      continue;
    }
    const auto number = [](std::string_view& text) {
      text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
      const size_t size = static_cast<size_t>(std::ranges::find_if_not(text, is_digit) - text.begin());
      const std::string_view digits = text.substr(0, size);
      text.remove_prefix(size);
      return digits;
    };
    const std::string_view x = number(a);
    const std::string_view y = number(b);
    if (x != y) return x.size() != y.size() ? x.size() < y.size() : x < y;
  }
  return a.size() < b.size();
}

std::optional<int64_t> dim_of(std::string_view text) {
  int64_t dim = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), dim);
  if (error != std::errc() || end != text.data() + text.size() || dim < 1 || dim > kMaxDim) return std::nullopt;
  return dim;
}

ListedWeight read_line(const std::vector<std::string>& words, std::string_view where) {
  const auto rows = words.size() > 1 ? dim_of(words[1]) : std::nullopt;
  const auto columns = words.size() > 2 ? dim_of(words[2]) : std::nullopt;
  if (words.size() < 4 || words.size() > 5 || !rows || !columns)
    fail(ErrorCode::kInvalidArgument,
         "{}: {} is not NAME ROWS COLUMNS DTYPE [FORMAT], with 1 to {} rows and columns"_message, where,
         tessera::quoted(fmt::format("{}", fmt::join(words, " "))), kMaxDim);
  try {
    ListedWeight weight{.tensor = {.name = words[0], .dtype = parse_dtype(words[3]), .shape = {*rows, *columns}}};
    if (words.size() == 5) weight.format = etp::WeightFormat::parse(words[4]);
    return weight;
  } catch (const Error& error) {
    fail(error.code(), "{}: {}"_message, where, error.what());
  }
}

std::vector<ListedWeight> read_list(const std::filesystem::path& path) {
  errno = 0;
  std::ifstream file(path);
  if (!file) fail_errno("cannot read " + path.string());
  std::vector<ListedWeight> weights;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    std::istringstream text(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; text >> word;) words.push_back(word);
    if (words.empty()) continue;
    weights.push_back(read_line(words, fmt::format("{}:{}", path.string(), number)));
    if (weights.size() > kMaxWeights)
      fail(ErrorCode::kInvalidArgument, "{}: more than {} weights"_message, path.string(), kMaxWeights);
  }
  if (file.bad()) fail_errno("cannot read " + path.string());
  return weights;
}

bool is_checkpoint(const std::filesystem::path& path) {
  return path.extension() == ".safetensors" || path.extension() == ".json" || std::filesystem::is_directory(path);
}

void add_weight(EtpModel& model, const ListedWeight& listed, const etp::WeightFormat& format,
                const EtpModelOptions& options) {
  const Shape& shape = listed.tensor.shape;
  const bool stack = shape.size() == 3;
  if (stack && shape[0] > kMaxExperts)
    fail(ErrorCode::kInvalidArgument, "{} experts, {} are possible"_message, shape[0], kMaxExperts);
  const int64_t rows = shape[shape.size() - 2];
  const int64_t columns = shape[shape.size() - 1];
  const DType compute = options.dtype.value_or(listed.tensor.dtype);
  const etp::Sharding sharding =
      etp::shard_rows(rows, options.ranks, etp::alignment_of(format, options.pad_for_alignment));
  const int experts = stack ? static_cast<int>(shape[0]) : 0;
  const uint32_t list = stack ? static_cast<uint32_t>(model.costs.size() + 1) : 0;
  model.names.push_back(listed.tensor.name);
  model.costs.push_back(etp::gather_cost(
      {.padded_rows = sharding.padded, .columns = columns, .format = format, .decoded = compute, .experts = experts},
      model.keys));
  for (int expert = 0; expert < std::max(experts, 1); ++expert)
    model.weights.push_back({.sharding = sharding,
                             .columns = columns,
                             .parameter = listed.tensor.dtype,
                             .format = format,
                             .wgrad = compute,
                             .experts = list});
}

}  // namespace

std::vector<ListedWeight> read_model(const std::filesystem::path& path) {
  if (!is_checkpoint(path)) return read_list(path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  std::vector<ListedWeight> weights;
  for (const TensorInfo& tensor : checkpoint.tensors()) weights.push_back({tensor});
  std::ranges::sort(weights, naturally_less,
                    [](const ListedWeight& weight) { return std::string_view(weight.tensor.name); });
  return weights;
}

WeightFormatRules WeightFormatRules::parse(std::span<const std::string> texts) {
  WeightFormatRules rules;
  for (const std::string& text : texts) {
    const std::string where = fmt::format("format rule {}", in_quotes(text));
    const size_t equals = text.find('=');
    if (equals == std::string::npos)
      fail(ErrorCode::kInvalidArgument, "{}: no '=': write REGEX=FORMAT, for example '.*proj.*=mxfp8'"_message, where);
    const std::string regex = text.substr(0, equals);
    NameFilter names = NameFilter::parse({&regex, 1}, where);
    try {
      rules.rules_.emplace_back(std::move(names), etp::WeightFormat::parse(std::string_view(text).substr(equals + 1)));
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "{}: {}"_message, where, error.what());
    }
  }
  return rules;
}

std::optional<etp::WeightFormat> WeightFormatRules::find(std::string_view name) const {
  const auto rule = std::ranges::find_if(rules_, [&](const auto& r) { return r.first.matches(name); });
  return rule == rules_.end() ? std::nullopt : std::optional(rule->second);
}

EtpModel shard_model(std::span<const ListedWeight> listed, const WeightFormatRules& rules,
                     const EtpModelOptions& options) {
  EtpModel model;
  for (const ListedWeight& weight : listed) {
    const TensorInfo& tensor = weight.tensor;
    const int64_t elements = element_count(tensor.shape);
    const bool matrix = tensor.shape.size() == 2 || tensor.shape.size() == 3;
    const bool computed = tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF16;
    if (!matrix || !computed || elements < std::max<int64_t>(options.min_elements, 1)) {
      ++model.replicated;
      model.replicated_bytes += bytes_of(tensor.dtype, elements);
      continue;
    }
    try {
      std::optional<etp::WeightFormat> format = rules.find(tensor.name);
      if (!format) format = weight.format;
      add_weight(model, weight, format.value_or(etp::WeightFormat(options.dtype.value_or(tensor.dtype))), options);
    } catch (const Error& error) {
      fail(error.code(), "tensor {}: {}"_message, tessera::quoted(tensor.name), error.what());
    }
  }
  return model;
}

}  // namespace tessera::tools
