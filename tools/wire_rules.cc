#include "tools/wire_rules.h"

#include <algorithm>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera::tools {

WireRules::WireRules(std::vector<Rule> rules) : rules_(std::move(rules)) {}

WireRules WireRules::parse(std::span<const std::string> texts) {
  std::vector<Rule> rules;
  for (const std::string& text : texts) {
    const std::string where = fmt::format("wire rule {}", in_quotes(text));
    const size_t equals = text.find('=');
    const bool all = equals == std::string::npos;
    const std::string regex = all ? "(?s).*" : text.substr(0, equals);
    const std::string_view format = std::string_view(text).substr(all ? 0 : equals + 1);
    NameFilter names = NameFilter::parse({&regex, 1}, where);
    try {
      rules.push_back({std::move(names), format == "none" ? std::nullopt : std::optional(parse_format(format))});
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "{}: {}, or none{}"_message, where, error.what(),
           all ? "; for some tensors only, write REGEX=FORMAT, for example '.*proj.*=mxfp8'" : "");
    }
  }
  return WireRules(std::move(rules));
}

std::optional<Format> WireRules::find(std::string_view name) const {
  const auto rule = std::ranges::find_if(rules_, [&](const Rule& r) { return r.names.matches(name); });
  return rule == rules_.end() ? std::nullopt : rule->format;
}

void WireRules::require_matches(std::span<const std::string> names) const {
  for (const Rule& rule : rules_) rule.names.require_matches(names, "--wire");
}

}  // namespace tessera::tools
