#include "peer/inspection.h"

#include "base/fail.h"
#include "base/socket.h"
#include "peer/handshake.h"
#include "peer/identity.h"

namespace tessera {

Inspection::Inspection(const std::string& address, Deadline deadline)
    : socket_(connect_unix(address, deadline)), reader_(kBusMagic, {.payload_bytes = kMaxReportBytes, .fds = 0}) {
  require_same_user(socket_.get());
  FrameWriter writer(kBusMagic, kProtocolMax, kMaxHelloBytes);
  writer.push(kCode<Inspect>, message_bytes(Inspect{}));
  writer.flush(socket_.get(), deadline);
}

Report Inspection::answer(Deadline deadline) {
  const Frame frame = wait_frame(socket_.get(), reader_, deadline);
  if (frame.type == kCode<Reject>) {
    const Reject reject = parse<Reject>(frame.payload);
    throw Error(reject.code, reject.text);
  }
  if (frame.type != kCode<Report>) fail(ErrorCode::kMismatch, "answered Inspect with message {}"_message, frame.type);
  return parse<Report>(frame.payload);
}

}  // namespace tessera
