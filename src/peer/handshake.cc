#include "peer/handshake.h"

namespace tessera {
namespace {

constexpr uint32_t kMaxRejectText = 2 << 10;

}  // namespace

void Hello::write(ByteWriter& out) const {
  out.put(protocol_min);
  out.put(protocol_max);
  out.put_string(release);
  if (!speaks_ours()) return;
  out.put_string(name_space);
  out.put_string(job);
  out.put(rank);
  incarnation.write(out);
}

Hello Hello::read(ByteReader& in) {
  Hello hello;
  hello.protocol_min = in.get<uint16_t>();
  hello.protocol_max = in.get<uint16_t>();
  hello.release = in.get_string(64);
  if (hello.speaks_ours()) {  // else the rest may look otherwise
    hello.name_space = in.get_string(256);
    hello.job = in.get_string(64);
    hello.rank = in.get<Rank>();
    hello.incarnation = Incarnation::read(in);
  }
  in.skip_rest();  // a later version may have more to say
  return hello;
}

void Welcome::write(ByteWriter& out) const {
  out.put(protocol);
  out.put_string(release);
  out.put_string(job);
  out.put(rank);
  incarnation.write(out);
}

Welcome Welcome::read(ByteReader& in) {
  Welcome welcome;
  welcome.protocol = in.get<uint16_t>();
  welcome.release = in.get_string(64);
  welcome.job = in.get_string(64);
  welcome.rank = in.get<Rank>();
  welcome.incarnation = Incarnation::read(in);
  return welcome;
}

void Reject::write(ByteWriter& out) const {
  write_status(Status(code, text.substr(0, kMaxRejectText)), out);
}

Reject Reject::read(ByteReader& in) {
  Reject reject;
  reject.code = read_code(in);
  reject.text = in.get_string(kMaxRejectText);
  if (reject.code == ErrorCode::kOk) fail(ErrorCode::kInvalidArgument, "Reject: without an error");
  return reject;
}

void Attach::write(ByteWriter& out) const {
  out.put_string(pair);
  out.put_string(batch);
  out.put(purpose);
  out.put_string(session);
}

Attach Attach::read(ByteReader& in) {
  Attach attach;
  attach.pair = in.get_string(64);
  attach.batch = in.get_string(64);
  attach.purpose = in.get_enum(Purpose::kAgree);
  attach.session = in.get_string(16);
  return attach;
}

Status Detach::reason(const std::string& name) const {
  if (status.ok()) return failed(ErrorCode::kPeerLost, "{} has closed the batch", name);
  return failed(status.code(), "{} has closed the batch: {}", name, status.message());
}

void Detach::write(ByteWriter& out) const {
  write_status(status, out);
}

Detach Detach::read(ByteReader& in) {
  return {.status = read_heard(in)};
}

void Broken::write(ByteWriter& out) const {
  write_status(status, out);
}

Broken Broken::read(ByteReader& in) {
  Broken broken{.status = read_heard(in)};
  if (broken.status.ok()) fail(ErrorCode::kInvalidArgument, "Broken: without an error");
  return broken;
}

}  // namespace tessera
