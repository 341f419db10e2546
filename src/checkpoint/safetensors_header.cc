#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "base/fail.h"
#include "checkpoint/json_events.h"
#include "checkpoint/shown.h"

namespace tessera::checkpoint {
namespace {

// safetensors spells dtypes in capitals and accepts no other spelling.
std::string file_name_of(DType dtype) {
  std::string name(to_string(dtype));
  std::ranges::transform(name, name.begin(),
                         [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; });
  return name;
}

std::optional<DType> dtype_of_file_name(std::string_view name) {
  const auto dtype = dtype_of(name);
  return dtype && file_name_of(*dtype) == name ? dtype : std::nullopt;
}

class HeaderEvents : public JsonEvents<HeaderEvents> {
 public:
  explicit HeaderEvents(std::string_view path) : path_(path) {}

  SafetensorsHeader take() { return std::move(header_); }
  std::string where() const {
    if (level_ == Level::kMetadata) return fmt::format("{}: {}", path_, kMetadataKey);
    if (level_ == Level::kFile || header_.tensors.empty()) return fmt::format("{}: header", path_);
    const std::string name = shown(header_.tensors.back().info.name);
    return field_.empty() ? fmt::format("{}: tensor {}", path_, name)
                          : fmt::format("{}: tensor {}: {}", path_, name, field_);
  }

  bool start_object(size_t) {
    if (level_ == Level::kNone) {
      level_ = Level::kFile;
    } else if (level_ == Level::kFile) {
      if (key_ == kMetadataKey) {
        level_ = Level::kMetadata;
      } else {
        level_ = Level::kTensor;
        header_.tensors.push_back({.info = {.name = std::move(key_), .shape = {}}});
        seen_ = {};
      }
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() {
    if (level_ == Level::kTensor && !(seen_.dtype && seen_.shape && seen_.offsets)) {
      field_.clear();
      fail(ErrorCode::kInvalidArgument, "{}: lacks {}"_message, where(),
           !seen_.dtype   ? "dtype"
           : !seen_.shape ? "shape"
                          : "data_offsets");
    }
    level_ = level_ == Level::kFile ? Level::kNone : Level::kFile;
    field_.clear();
    return true;
  }

  bool key(std::string& name) {
    if (level_ == Level::kFile) {
      if (!names_.insert(name).second)
        fail(ErrorCode::kInvalidArgument, "{}: tensor {} is there twice"_message, path_, shown(name));
      key_ = std::move(name);
    } else if (level_ == Level::kMetadata) {
      if (header_.metadata.contains(name))
        fail(ErrorCode::kInvalidArgument, "{}: {} is there twice"_message, where(), shown(name));
      key_ = std::move(name);
    } else {
      field_.clear();
      bool* const seen = name == "dtype"          ? &seen_.dtype
                         : name == "shape"        ? &seen_.shape
                         : name == "data_offsets" ? &seen_.offsets
                                                  : nullptr;
      if (seen == nullptr) fail(ErrorCode::kInvalidArgument, "{}: unknown field {}"_message, where(), shown(name));
      if (std::exchange(*seen, true)) fail(ErrorCode::kInvalidArgument, "{}: {} is there twice"_message, where(), name);
      field_ = std::move(name);
    }
    return true;
  }

  bool string(std::string& value) {
    if (level_ == Level::kMetadata) {
      header_.metadata.emplace(std::move(key_), std::move(value));
      return true;
    }
    if (level_ != Level::kTensor || field_ != "dtype" || in_array_) unexpected("a string");
    const auto dtype = dtype_of_file_name(value);
    if (!dtype)
      fail(ErrorCode::kInvalidArgument, "{}: {} is not one that Tessera knows"_message, where(), shown(value));
    header_.tensors.back().info.dtype = *dtype;
    return true;
  }

  bool start_array(size_t) {
    if (level_ != Level::kTensor || in_array_ || (field_ != "shape" && field_ != "data_offsets"))
      unexpected("an array");
    in_array_ = true;
    offsets_ = 0;
    return true;
  }

  bool number_unsigned(uint64_t value) {
    if (!in_array_) unexpected(fmt::format("the number {}", value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail(ErrorCode::kInvalidArgument, "{}: {} is too large"_message, where(), value);
    HeaderEntry& entry = header_.tensors.back();
    if (field_ == "shape") {
      if (entry.info.shape.size() == kMaxDims)
        fail(ErrorCode::kInvalidArgument, "{}: more than {} dims"_message, where(), kMaxDims);
      entry.info.shape.push_back(static_cast<Index>(value));
    } else {
      if (offsets_ == 2) fail(ErrorCode::kInvalidArgument, "{}: more than two numbers"_message, where());
      (offsets_++ == 0 ? entry.begin : entry.end) = static_cast<int64_t>(value);
    }
    return true;
  }

  bool end_array() {
    in_array_ = false;
    if (field_ == "data_offsets" && offsets_ != 2)
      fail(ErrorCode::kInvalidArgument, "{}: {} numbers instead of two"_message, where(), offsets_);
    return true;
  }

 private:
  enum class Level { kNone, kFile, kMetadata, kTensor };
  struct Seen {
    bool dtype = false;
    bool shape = false;
    bool offsets = false;
  };

  std::string_view path_;
  SafetensorsHeader header_;
  std::unordered_set<std::string> names_;
  Level level_ = Level::kNone;
  Seen seen_;          // fields of the tensor being read
  std::string key_;    // the last key of the file or of the metadata
  std::string field_;  // of the tensor being read
  bool in_array_ = false;
  int offsets_ = 0;  // numbers of data_offsets read so far
};

void check_extent(const HeaderEntry& entry, std::string_view path) {
  const TensorInfo& info = entry.info;
  const auto where = [&] { return fmt::format("{}: tensor {}", path, shown(info.name)); };
  if (entry.begin > entry.end)
    fail(ErrorCode::kInvalidArgument, "{}: data_offsets [{}, {}] run backwards"_message, where(), entry.begin,
         entry.end);
  const int bits = bits_of(info.dtype);
  int64_t elements = 0;
  try {
    elements = element_count(info.shape);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "{}: {}"_message, where(), error.what());
  }
  const std::string shape = to_string_shape(info.shape);
  if (elements > std::numeric_limits<int64_t>::max() / bits)
    fail(ErrorCode::kInvalidArgument, "{}: shape {} is too large"_message, where(), shape);
  if (elements * bits % 8 != 0)
    fail(ErrorCode::kInvalidArgument, "{}: shape {} of {} ends inside a byte"_message, where(), shape,
         to_string(info.dtype));
  if (entry.end - entry.begin != elements * bits / 8)
    fail(ErrorCode::kInvalidArgument, "{}: shape {} of {} takes {} bytes, data_offsets [{}, {}] give {}"_message,
         where(), shape, to_string(info.dtype), elements * bits / 8, entry.begin, entry.end, entry.end - entry.begin);
}

std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    fail(ErrorCode::kInvalidArgument, "the name {} is not UTF-8, as safetensors requires"_message, shown(text));
  }
}

// Tensors cover the data in order, without gaps or overlaps. REQUIRES: sorted by begin, then end.
void check_coverage(const std::vector<HeaderEntry>& tensors, int64_t data_bytes, std::string_view path) {
  int64_t covered = 0;
  for (const HeaderEntry& entry : tensors) {
    const auto where = [&] { return fmt::format("{}: tensor {}", path, shown(entry.info.name)); };
    if (entry.end > data_bytes)
      fail(ErrorCode::kInvalidArgument,
           "{}: its bytes end at {}, the file's data at {}: is the file truncated?"_message, where(), entry.end,
           data_bytes);
    if (entry.begin != covered)
      fail(ErrorCode::kInvalidArgument, "{}: its bytes begin at {}, {} those before it at {}"_message, where(),
           entry.begin, entry.begin < covered ? "overlapping" : "leaving a gap after", covered);
    covered = entry.end;
  }
  if (covered != data_bytes)
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes after the last tensor belong to none"_message, path,
         data_bytes - covered);
}

}  // namespace

SafetensorsHeader parse_header(std::string_view json, int64_t data_bytes, std::string_view path) {
  if (!json.starts_with('{'))
    fail(ErrorCode::kInvalidArgument, "{}: not a safetensors file: its header does not begin with '{{'"_message, path);
  HeaderEvents events(path);
  nlohmann::json::sax_parse(json.begin(), json.end(), &events);
  SafetensorsHeader header = events.take();
  for (const HeaderEntry& entry : header.tensors) check_extent(entry, path);
  std::ranges::stable_sort(header.tensors, [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_coverage(header.tensors, data_bytes, path);
  return header;
}

std::string format_header(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  const auto separate = [&json] { json += json.back() == '{' ? "" : ","; };
  if (!metadata.empty()) {
    json += fmt::format("\"{}\":{{", kMetadataKey);
    for (const auto& [key, value] : metadata) {
      separate();
      json += json_string(key) + ":" + json_string(value);
    }
    json += '}';
  }
  int64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    separate();
    const int64_t end = offset + bytes_of(tensor.dtype, element_count(tensor.shape));
    json += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_string(tensor.name),
                        file_name_of(tensor.dtype), fmt::join(tensor.shape, ","), offset, end);
    offset = end;
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  return json;
}

}  // namespace tessera::checkpoint
