#include "peer/message.h"

namespace tessera {
namespace {

constexpr uint32_t kMaxText = 64 << 10;

}  // namespace

void write_status(const Status& status, ByteWriter& out) {
  out.put(static_cast<uint8_t>(status.code()));
  out.put_string(std::string_view(status.message()).substr(0, kMaxText));
}

ErrorCode read_code(ByteReader& in) {
  const auto code = in.get<uint8_t>();
  if (code > static_cast<uint8_t>(ErrorCode::kInternal))
    fail(ErrorCode::kInvalidArgument, "message: unknown error code {}", code);
  return static_cast<ErrorCode>(code);
}

Status read_status(ByteReader& in) {
  const ErrorCode code = read_code(in);
  std::string text = in.get_string(kMaxText);
  return code == ErrorCode::kOk ? Status() : Status(code, std::move(text));
}

Status read_heard(ByteReader& in) {
  const Status status = read_status(in);
  return status.code() == ErrorCode::kCancelled ? Status(ErrorCode::kPeerLost, status.message()) : status;
}

}  // namespace tessera
