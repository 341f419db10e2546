#include "checkpoint/checkpoint_index.h"

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/fail.h"
#include "checkpoint/json_events.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/shown.h"
#include "checkpoint/strided_read.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kMaxIndexBytes = 100'000'000;
constexpr int kMaxDepth = 16;  // of values beside weight_map, which are skipped

class IndexEvents : public JsonEvents<IndexEvents> {
 public:
  explicit IndexEvents(std::string_view path) : path_(path) {}

  WeightMap take() {
    if (!found_) fail(ErrorCode::kInvalidArgument, "{}: it has no weight_map"_message, path_);
    return std::move(files_);
  }
  std::string where() const {
    return in_weights() ? fmt::format("{}: weight_map: {}", path_, shown(tensor_)) : std::string(path_);
  }

  bool null() { return skip("null"); }
  bool boolean(bool) { return skip("a boolean"); }
  bool number_integer(int64_t) { return skip("a number"); }
  bool number_unsigned(uint64_t) { return skip("a number"); }
  bool number_float(double, const std::string&) { return skip("a number"); }

  bool start_object(size_t) {
    if (in_weights()) unexpected("an object");
    return open();
  }
  bool end_object() {
    --depth_;
    return true;
  }
  bool start_array(size_t) {
    if (depth_ == 0 || in_weights() || weights_next()) unexpected("an array");
    return open();
  }
  bool end_array() { return end_object(); }

  bool key(std::string& name) {
    if (depth_ == 1) {
      top_key_ = std::move(name);
      if (weights_next() && std::exchange(found_, true))
        fail(ErrorCode::kInvalidArgument, "{}: weight_map is there twice"_message, path_);
    } else if (in_weights()) {
      if (!names_.insert(name).second)
        fail(ErrorCode::kInvalidArgument, "{}: weight_map: {} is there twice"_message, path_, shown(name));
      tensor_ = std::move(name);
    }
    return true;
  }

  bool string(std::string& value) {
    if (!in_weights()) return skip("a string");
    const std::filesystem::path file(value);
    if (file.empty() || file.filename() != file || value == "." || value == ".." || value.find('\0') != value.npos)
      fail(ErrorCode::kInvalidArgument, "{}: {} is not the name of a file beside the index"_message, where(),
           shown(value));
    files_[value].insert(std::move(tensor_));
    return true;
  }

 private:
  bool weights_next() const { return depth_ == 1 && top_key_ == "weight_map"; }
  bool in_weights() const { return depth_ == 2 && top_key_ == "weight_map"; }
  bool skip(std::string_view what) {
    if (depth_ == 0 || in_weights() || weights_next()) unexpected(what);
    return true;
  }
  bool open() {
    if (++depth_ > kMaxDepth)
      fail(ErrorCode::kInvalidArgument, "{}: nested deeper than {} levels"_message, path_, kMaxDepth);
    return true;
  }

  std::string_view path_;
  WeightMap files_;
  std::unordered_set<std::string> names_;
  std::string top_key_;
  std::string tensor_;
  int depth_ = 0;
  bool found_ = false;
};

}  // namespace

WeightMap parse_index(std::string_view json, std::string_view path) {
  IndexEvents events(path);
  nlohmann::json::sax_parse(json.begin(), json.end(), &events);
  return events.take();
}

std::string read_index(const std::filesystem::path& path) {
  int64_t size = 0;
  const UniqueFd fd = open_regular_file(path, size);
  if (size > kMaxIndexBytes)
    fail(ErrorCode::kInvalidArgument, "{}: an index of {} bytes, more than the limit of {}"_message, path.string(),
         size, kMaxIndexBytes);
  std::string json(static_cast<size_t>(size), '\0');
  read_exactly(fd.get(), 0, std::as_writable_bytes(std::span(json)), path.string());
  return json;
}

}  // namespace tessera::checkpoint
