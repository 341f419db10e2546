#include "tools/layout_rules.h"

#include <re2/re2.h>

#include <algorithm>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"
#include "checkpoint/shown.h"

namespace tessera::tools {
namespace {

std::unique_ptr<RE2> compile(const std::string& regex, std::string_view where) {
  auto compiled = std::make_unique<RE2>(regex, RE2::Quiet);
  if (!compiled->ok())
    fail(ErrorCode::kInvalidArgument, "{}: bad regex {}: {}"_message, where, in_quotes(regex), compiled->error());
  return compiled;
}

bool full_match(std::string_view name, const RE2& regex) {
  return RE2::FullMatch(re2::StringPiece(name.data(), name.size()), regex);
}

}  // namespace

struct LayoutRules::Rule {
  std::string text;
  std::unique_ptr<RE2> regex;
  Layout layout;
};

LayoutRules::LayoutRules(std::vector<Rule> rules) : rules_(std::move(rules)) {}
LayoutRules::LayoutRules(LayoutRules&&) noexcept = default;
LayoutRules& LayoutRules::operator=(LayoutRules&&) noexcept = default;
LayoutRules::~LayoutRules() = default;

LayoutRules LayoutRules::parse(std::span<const std::string> texts) {
  std::vector<Rule> rules;
  for (const std::string& text : texts) {
    const std::string where = fmt::format("layout rule {}", in_quotes(text));
    const size_t equals = text.find('=');
    if (equals == std::string::npos)
      fail(ErrorCode::kInvalidArgument, "{}: no '=': write REGEX=LAYOUT, for example '.*=tp=2:S0'"_message, where);
    auto regex = compile(text.substr(0, equals), where);
    try {
      rules.push_back({text, std::move(regex), Layout::parse(std::string_view(text).substr(equals + 1))});
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "{}: {}"_message, where, error.what());
    }
  }
  return LayoutRules(std::move(rules));
}

const LayoutRules::Rule* LayoutRules::find_rule(std::string_view name) const {
  const auto rule = std::ranges::find_if(rules_, [&](const Rule& r) { return full_match(name, *r.regex); });
  return rule == rules_.end() ? nullptr : &*rule;
}

const Layout* LayoutRules::find(std::string_view name) const {
  const Rule* rule = find_rule(name);
  return rule == nullptr ? nullptr : &rule->layout;
}

std::vector<Layout> LayoutRules::assign(std::span<const TensorInfo> tensors) const {
  std::vector<Layout> layouts;
  std::vector<std::string> unmatched;
  layouts.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const Rule* rule = find_rule(tensor.name);
    if (rule == nullptr) {
      unmatched.push_back(tensor.name);
      continue;
    }
    try {
      layouts.push_back(rule->layout.bind(tensor.shape));
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "tensor {} of shape {} under rule {}: {}"_message,
           checkpoint::shown(tensor.name), to_string_shape(tensor.shape), in_quotes(rule->text), error.what());
    }
  }
  if (!unmatched.empty())
    fail(ErrorCode::kInvalidArgument,
         "no layout rule matches {} of {} tensors: {}; add a rule, for example '.*=2:R'"_message, unmatched.size(),
         tensors.size(), list_names(unmatched));
  return layouts;
}

struct NameFilter::Impl {
  std::vector<std::unique_ptr<RE2>> regexes;
};

NameFilter::NameFilter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NameFilter::NameFilter(NameFilter&&) noexcept = default;
NameFilter& NameFilter::operator=(NameFilter&&) noexcept = default;
NameFilter::~NameFilter() = default;

NameFilter NameFilter::parse(std::span<const std::string> regexes, std::string_view option) {
  auto impl = std::make_unique<Impl>();
  for (const std::string& regex : regexes) impl->regexes.push_back(compile(regex, option));
  return NameFilter(std::move(impl));
}

bool NameFilter::matches(std::string_view name) const {
  return std::ranges::any_of(impl_->regexes, [&](const auto& regex) { return full_match(name, *regex); });
}

void NameFilter::require_matches(std::span<const std::string> names, std::string_view where) const {
  for (const auto& regex : impl_->regexes)
    if (std::ranges::none_of(names, [&](const std::string& name) { return full_match(name, *regex); }))
      fail(
          ErrorCode::kInvalidArgument,
          "{}: {} matches none of the {} tensors ({}): a regex matches whole names, '.*bias' and not 'bias'; leave out "
          "what is meant for another model"_message,
          where, in_quotes(regex->pattern()), names.size(), list_names(names, 4));
}

std::string list_names(std::span<const std::string> names, size_t limit) {
  std::string list;
  for (const std::string& name : names.first(std::min(limit, names.size())))
    list += fmt::format("{}{}", list.empty() ? "" : ", ", checkpoint::shown(name));
  if (names.size() > limit) list += fmt::format(" and {} more", names.size() - limit);
  return list;
}

}  // namespace tessera::tools
