// Rules for the formats in which tensors travel: `REGEX=FORMAT`, tried in order; the first rule whose regex (RE2)
// matches the whole name wins. `FORMAT` alone is for all tensors, as wire="FORMAT" in Python. A tensor is not quantised
// if that rule says `none`, or if no rule matches. The first '=' separates the two; a regex with an '=' writes \x3d.
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
  // Throws Error(kInvalidArgument) for a bad regex or an unknown format, and names the rule; for an unknown format the
  // message lists the known ones.
  static WireRules parse(std::span<const std::string> rules);

  std::optional<Format> find(std::string_view name) const;
  // Throws Error(kInvalidArgument), which names it, for a rule whose regex matches none of `names`.
  void require_matches(std::span<const std::string> names) const;

 private:
  struct Rule {
    NameFilter names;
    std::optional<Format> format;
  };
  explicit WireRules(std::vector<Rule> rules);

  std::vector<Rule> rules_;
};

}  // namespace tessera::tools
