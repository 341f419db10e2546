// Rules that give every tensor of a model its layout: `REGEX=LAYOUT`, tried in order; the first rule whose regex (RE2)
// matches the whole name wins. The first '=' separates the two; a regex with an '=' writes \x3d.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/layout.h"

namespace tessera::tools {

// Move-only; const calls are thread-safe. Errors are tessera::Error(kInvalidArgument).
class LayoutRules {
 public:
  // Throws for a rule without '=', a bad regex or a bad layout, and names the rule.
  static LayoutRules parse(std::span<const std::string> rules);
  LayoutRules(LayoutRules&&) noexcept;
  LayoutRules& operator=(LayoutRules&&) noexcept;
  ~LayoutRules();

  // nullptr if no rule matches.
  const Layout* find(std::string_view name) const;

  // One layout for each tensor, in order, bound to its shape. Throws one line that lists the tensors without a rule
  // (the first hundred and a count), or that names the tensor, its shape and the rule whose layout does not fit.
  std::vector<Layout> assign(std::span<const TensorInfo> tensors) const;

 private:
  struct Rule;
  explicit LayoutRules(std::vector<Rule> rules);
  const Rule* find_rule(std::string_view name) const;

  std::vector<Rule> rules_;
};

// Matches names that any of several regexes matches as a whole: `--skip`.
class NameFilter {
 public:
  static NameFilter parse(std::span<const std::string> regexes, std::string_view option);
  NameFilter(NameFilter&&) noexcept;
  NameFilter& operator=(NameFilter&&) noexcept;
  ~NameFilter();

  bool matches(std::string_view name) const;
  // Throws Error(kInvalidArgument), which names it, for a regex that matches none of `names`: a mistyped one would do
  // nothing. `where` says what has it.
  void require_matches(std::span<const std::string> names, std::string_view where) const;

 private:
  struct Impl;
  explicit NameFilter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// "a, b, c and 17 more": at most `limit` names, each as shown by checkpoint::shown().
std::string list_names(std::span<const std::string> names, size_t limit = 100);

}  // namespace tessera::tools
