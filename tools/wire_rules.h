// Rules that say what tensors are quantised to on their way: `REGEX=FORMAT`, tried in order, the first whose regex
// (RE2) matches the whole name wins; one that says `none`, or none that matches, leaves a tensor as it is. The first
// '=' divides; a regex that needs one writes \x3d.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/quantize.h"
#include "tools/layout_rules.h"

namespace tessera::tools {

// Move-only; const calls are thread-safe.
class WireRules {
 public:
  // Throws Error(kInvalidArgument) for a rule without '=', a bad regex or an unknown format, naming the rule; of
  // formats the message lists those there are.
  static WireRules parse(std::span<const std::string> rules);

  std::optional<Format> find(std::string_view name) const;

 private:
  struct Rule {
    NameFilter names;
    std::optional<Format> format;
  };
  explicit WireRules(std::vector<Rule> rules);

  std::vector<Rule> rules_;
};

}  // namespace tessera::tools
