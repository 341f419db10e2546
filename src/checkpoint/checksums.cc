#include "checkpoint/checksums.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/fail.h"
#include "checkpoint/json_events.h"
#include "checkpoint/shown.h"
#include "codec/simd/digest.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kDigits = 32;

// Takes the strings of the object that a path of keys leads to, and skips everything else.
class ChecksumEvents : public JsonEvents<ChecksumEvents> {
 public:
  ChecksumEvents(std::span<const std::string_view> keys, std::string_view path) : keys_(keys), path_(path) {}

  Checksums take() { return std::move(checksums_); }
  std::string where() const { return std::string(path_); }

  bool null() { return skip(); }
  bool boolean(bool) { return skip(); }
  bool number_integer(int64_t) { return skip(); }
  bool number_unsigned(uint64_t) { return skip(); }
  bool number_float(double, const std::string&) { return skip(); }

  bool start_object(size_t) {
    if (in_checksums()) refuse();
    if (depth_ == on_path_ && (depth_ == 0 || key_leads_on_)) ++on_path_;
    return open();
  }
  bool end_object() {
    if (depth_ == on_path_) --on_path_;
    --depth_;
    return true;
  }
  bool start_array(size_t) {
    skip();
    return open();
  }
  bool end_array() {
    --depth_;
    return true;
  }

  bool key(std::string& name) {
    if (in_checksums())
      tensor_ = std::move(name);
    else
      key_leads_on_ = depth_ == on_path_ && keys_[depth_ - 1] == name;
    return true;
  }

  bool string(std::string& value) {
    if (!in_checksums()) return skip();
    const bool hex = value.size() == kDigits && value.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!hex || !checksums_.emplace(std::move(tensor_), std::move(value)).second) refuse();
    return true;
  }

 private:
  // Of the containers that are open, `on_path_` lie on the path: those from the outermost one on.
  bool in_checksums() const { return depth_ == on_path_ && depth_ == keys_.size() + 1; }
  bool skip() {
    const bool is_the_object = depth_ == on_path_ && depth_ == keys_.size() && (depth_ == 0 || key_leads_on_);
    if (in_checksums() || is_the_object) refuse();
    return true;
  }
  bool open() {
    key_leads_on_ = false;
    ++depth_;
    return true;
  }
  [[noreturn]] void refuse() const {
    fail(ErrorCode::kInvalidArgument,
         "{}: its checksums are none that save() or tessera recv --out wrote: load another checkpoint"_message, path_);
  }

  std::span<const std::string_view> keys_;
  std::string_view path_;
  Checksums checksums_;
  std::string tensor_;
  size_t depth_ = 0;
  size_t on_path_ = 0;
  bool key_leads_on_ = false;
};

Checksums checksums_at(std::span<const std::string_view> keys, std::string_view json, std::string_view path) {
  ChecksumEvents events(keys, path);
  nlohmann::json::sax_parse(json.begin(), json.end(), &events);
  return events.take();
}

}  // namespace

std::string checksum_of(std::span<const std::byte> packed) {
  Digest digest;
  digest_bytes(digest, 0, packed.data(), packed.size());
  return digest.to_string();
}

Checksums parse_checksums(std::string_view json, std::string_view path) {
  return checksums_at({}, json, path);
}

Checksums parse_index_checksums(std::string_view json, std::string_view path) {
  constexpr std::array<std::string_view, 3> kKeys{"metadata", "tessera", "checksums"};
  return checksums_at(kKeys, json, path);
}

std::string format_checksums(const Checksums& checksums) {
  return nlohmann::json(checksums).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace tessera::checkpoint
