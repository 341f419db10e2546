#include "base/message.h"
#include "base/metrics_server.h"
#include "base/socket.h"
#include "bus/registration/records.h"
#include "fuzz/targets.h"
#include "tessera/dtype.h"
#include "tools/layout_rules.h"
#include "tools/wire_rules.h"

namespace tessera::fuzz {
namespace {

void check_rule(const std::string& text) {
  const auto rules = tools::LayoutRules::parse(std::span(&text, 1));
  rules.find(text);
  accepts([&] { rules.assign(std::vector<TensorInfo>{{.name = "w", .shape = {8, 8}}}); }, 4 * text.size() + 4096);
}

void check_host_port(std::string_view text) {
  const HostPort parsed = parse_host_port(text);
  TESSERA_CHECK(parse_host_port(parsed.to_string()) == parsed);
}

// Every request is answered in HTTP/1.1 or waits for more bytes, but not for ever.
void check_http(std::string_view request) {
  const std::string answer = answer_http(request);
  TESSERA_CHECK(answer.empty() ? request.size() < 4096 : answer.starts_with("HTTP/1.1 "));
  TESSERA_CHECK(answer.find("\r\n\r\n") != std::string::npos || answer.empty());
  if (!answer.starts_with("HTTP/1.1 200 ")) fail(ErrorCode::kInvalidArgument, "no scrape"_message);
}

}  // namespace

bool text(Input input) {
  const auto read = [&] {
    ByteReader in(input, "input");
    const char kind = in.get<char>();
    const std::string text(as_text(in.rest()));
    switch (kind) {
      case 'r':
        return check_rule(text);
      case 'w':
        tools::WireRules::parse(std::span(&text, 1)).find(text);
        return;
      case 'f':
        tools::NameFilter::parse(std::span(&text, 1), "--skip").matches(text);
        return;
      case 'h':
        return check_host_port(text);
      case 'd':
        TESSERA_CHECK(parse_dtype(to_string(parse_dtype(text))) == parse_dtype(text));
        return;
      case 'H':
        return check_http(text);
      case 'm':
        parse_metrics_address(text);
        return;
      case 'n':
        return check_name("job", text);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  };
  return accepts(read, 16 * input.size() + (16 << 10));  // a user's own text is repeated, escaped
}

}  // namespace tessera::fuzz
