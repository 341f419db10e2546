// Wrappers of modules put a segment into the names of what they wrap, and models of models a prefix before them. Both
// jobs' names are compared without such segments; then one prefix is replaced by another in the receiver's names. A
// candidate is tried on all names before it is suggested.
#include "bus/registration/rename.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <optional>
#include <utility>

#include "bus/registration/name_table.h"

namespace tessera::bus {
namespace {

// The segments that wrappers add: DistributedDataParallel, torch.compile, FSDP, checkpoint_wrapper, Lightning, PEFT.
constexpr std::array<std::string_view, 6> kWrappers = {
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "base_layer"};
constexpr size_t kMostCandidates = 8;
constexpr size_t kMostSegments = 4;  // that a map names
constexpr size_t kMostPrefixBytes = 128;
constexpr size_t kLeastShare = 3;  // one in so many of the missing names must match, and not one by chance

using Wrappers = std::vector<std::string_view>;

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

std::string_view wrapper_at(std::string_view name, size_t at, const Wrappers& wrappers) {
  if (at > 0 && is_word(name[at - 1])) return {};
  for (const std::string_view wrapper : wrappers)
    if (name.substr(at).starts_with(wrapper) && name.substr(at + wrapper.size()).starts_with('.')) return wrapper;
  return {};
}

// re.sub(r"\b(a|b)\.", "", name)
std::string unwrapped(std::string_view name, const Wrappers& wrappers) {
  std::string rest;
  for (size_t i = 0; i < name.size();)
    if (const std::string_view wrapper = wrapper_at(name, i, wrappers); !wrapper.empty())
      i += wrapper.size() + 1;
    else
      rest += name[i++];
  return rest;
}

std::string_view first_segment(std::string_view name) {
  return name.substr(0, name.find('.'));
}

// A prefix that a map may name: without characters that mean something in a regular expression.
bool is_plain(std::string_view prefix) {
  return prefix.size() <= kMostPrefixBytes &&
         std::ranges::all_of(prefix, [](char c) { return is_word(c) || c == '.' || c == '-'; });
}

std::string escaped(std::string_view plain) {
  std::string text;
  for (const char c : plain) text += c == '.' ? std::string("\\.") : std::string(1, c);
  return text;
}

// Replaces `from` at the beginning of the receiver's names by `to`. With `segments`: in names that begin with one of
// them only.
struct Prefix {
  std::string from = {}, to = {};
  std::vector<std::string_view> segments = {};

  bool renames() const { return !from.empty() || !to.empty(); }
  bool is_like(const Prefix& other) const { return from == other.from && to == other.to; }
  std::string apply(const std::string& name) const {
    if (!segments.empty() && std::ranges::find(segments, first_segment(name)) == segments.end()) return name;
    return name.starts_with(from) ? to + name.substr(from.size()) : name;
  }
};

// One side's names, without some wrappers.
class Names {
 public:
  explicit Names(std::vector<std::string> names) : names_(std::move(names)), table_(names_.size()) {
    for (const std::string& name : names_) table_.add(name);
  }
  bool are_distinct() const { return table_.size() == names_.size(); }
  std::optional<uint32_t> find(std::string_view name) const { return table_.find(name); }
  const std::string& operator[](size_t i) const { return names_[i]; }
  size_t size() const { return names_.size(); }

 private:
  const std::vector<std::string> names_;
  NameTable table_;
};

class Search {
 public:
  Search(const NamedSide& sender, const NamedSide& receiver, const std::vector<bool>& filled)
      : sender_(sender), receiver_(receiver), filled_(filled) {
    missing_ = static_cast<size_t>(std::ranges::count(filled, false));
  }

  std::string suggestion() {
    if (missing_ == 0 || sender_.manifest.entries.empty()) return {};
    std::string best;
    if (attempt({}, {}, best) == missing_) return best;
    const auto [offered, taken] = wrappers();
    if (!offered.empty() || !taken.empty()) attempt(offered, taken, best);
    return best;
  }

 private:
  // The wrappers that only the names of one side have: of the sender, of the receiver.
  std::pair<Wrappers, Wrappers> wrappers() const {
    std::pair<Wrappers, Wrappers> only;
    for (const std::string_view wrapper : kWrappers) {
      const auto has = [&](const Manifest& manifest, auto name_of) {
        return std::ranges::any_of(manifest.entries, [&](const ManifestEntry& entry) {
          const std::string& name = name_of(entry);
          for (size_t at = name.find(wrapper); at != std::string::npos; at = name.find(wrapper, at + 1))
            if (!wrapper_at(name, at, {wrapper}).empty()) return true;
          return false;
        });
      };
      const bool sent = has(sender_.manifest, [](const ManifestEntry& entry) -> auto& { return entry.name; });
      const bool received = has(receiver_.manifest, source_of);
      if (sent && !received) only.first.push_back(wrapper);
      if (received && !sent) only.second.push_back(wrapper);
    }
    return only;
  }

  static const std::string& source_of(const ManifestEntry& entry) {
    return entry.source.name.empty() ? entry.name : entry.source.name;
  }

  // Tries the prefixes that make one of the missing names match. Sets `best` if more names match than ever before;
  // returns how many.
  size_t attempt(const Wrappers& of_sender, const Wrappers& of_receiver, std::string& best) {
    std::vector<std::string> names;
    for (const ManifestEntry& entry : sender_.manifest.entries) names.push_back(unwrapped(entry.name, of_sender));
    const Names offered(std::move(names));
    names.clear();
    for (const ManifestEntry& entry : receiver_.manifest.entries)
      names.push_back(unwrapped(source_of(entry), of_receiver));
    const Names taken(std::move(names));
    if (!offered.are_distinct()) return 0;
    std::vector<Prefix> prefixes;
    if (!of_sender.empty() || !of_receiver.empty()) prefixes.emplace_back();
    add_prefixes(offered, taken, prefixes);
    const Prefix* chosen = nullptr;
    for (const Prefix& prefix : prefixes) {
      const size_t matches = count(offered, taken, prefix);
      if (matches < std::min<size_t>(missing_, 2) || matches * kLeastShare < missing_ || matches < most_) continue;
      // A map is one expression: it replaces a prefix of some names only if it does nothing else.
      if (!prefix.segments.empty() && !of_receiver.empty()) continue;
      if (matches > most_) {
        most_ = matches;
        chosen = &prefix;
        best = text_of(of_sender, of_receiver, prefix);
      } else if (chosen != nullptr && chosen->renames() && !prefix.is_like(*chosen)) {
        best.clear();  // nothing says which of the two is meant
      }
    }
    return best.empty() ? 0 : most_;
  }

  // Of the first missing names: for each offered name that ends likewise, the two beginnings.
  void add_prefixes(const Names& offered, const Names& taken, std::vector<Prefix>& prefixes) const {
    size_t tried = 0;
    for (size_t i = 0; i < taken.size() && tried < 2; ++i) {
      if (filled_[i]) continue;
      ++tried;
      const std::string& name = taken[i];
      std::vector<std::pair<size_t, Prefix>> ends;  // by the common end's length
      for (size_t o = 0; o < offered.size(); ++o) {
        const size_t common = common_end(name, offered[o]);
        if (common == 0 || !fits(o, i)) continue;
        Prefix prefix{.from = name.substr(0, name.size() - common),
                      .to = offered[o].substr(0, offered[o].size() - common)};
        if (!is_plain(prefix.from) || !is_plain(prefix.to)) continue;
        if (!prefix.from.empty() && !prefix.to.empty() &&
            !may_be_another_model(prefix, name.substr(prefix.from.size())))
          continue;
        ends.emplace_back(common, std::move(prefix));
      }
      std::ranges::stable_sort(ends, std::greater(), [](const auto& end) { return end.first; });
      ends.resize(std::min(ends.size(), kMostCandidates));
      for (auto& [common, prefix] : ends) {
        prefixes.push_back(prefix);
        if (!prefix.from.empty()) continue;
        prefix.segments = segments_of_missing(taken);
        if (!prefix.segments.empty()) prefixes.push_back(std::move(prefix));
      }
    }
  }

  // Whether the end that both names have says more than which kind of parameter of which layer it is.
  static bool may_be_another_model(const Prefix& prefix, std::string_view end) {
    const auto has_number = [](std::string_view text) {
      return std::ranges::any_of(text, [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
    };
    return std::ranges::count(end, '.') > 0 && !has_number(prefix.from) && !has_number(prefix.to);
  }

  // The length of the last segments that both names have.
  static size_t common_end(std::string_view a, std::string_view b) {
    size_t same = 0, end = 0;
    while (same < std::min(a.size(), b.size()) && a[a.size() - 1 - same] == b[b.size() - 1 - same])
      if (a[a.size() - 1 - same++] == '.') end = same - 1;
    const auto begins = [same](std::string_view name) {
      return name.size() == same || name[name.size() - 1 - same] == '.';
    };
    return same > 0 && begins(a) && begins(b) ? same : end;
  }

  // The first segments of the names that are missing, if there are few, and no other name has them.
  std::vector<std::string_view> segments_of_missing(const Names& taken) const {
    std::vector<std::string_view> segments;
    for (size_t i = 0; i < taken.size(); ++i) {
      const std::string_view segment = first_segment(taken[i]);
      if (filled_[i] || std::ranges::find(segments, segment) != segments.end()) continue;
      if (segments.size() == kMostSegments || !is_plain(segment) || segment == taken[i]) return {};
      segments.push_back(segment);
    }
    for (size_t i = 0; i < taken.size(); ++i)
      if (filled_[i] && std::ranges::find(segments, first_segment(taken[i])) != segments.end()) return {};
    return segments;
  }

  // How many of the missing names match then; 0 if another one would match no more.
  size_t count(const Names& offered, const Names& taken, const Prefix& prefix) const {
    std::vector<bool> used(offered.size());
    for (size_t i = 0; i < taken.size(); ++i) {
      if (!filled_[i]) continue;
      const std::optional<uint32_t> offer = offered.find(prefix.apply(taken[i]));
      if (!offer || !fits(*offer, i)) return 0;
      used[*offer] = true;
    }
    size_t matches = 0;
    for (size_t i = 0; i < taken.size(); ++i) {
      if (filled_[i]) continue;
      const std::optional<uint32_t> offer = offered.find(prefix.apply(taken[i]));
      if (offer && !used[*offer] && fits(*offer, i)) ++matches;
    }
    return matches;
  }

  bool fits(size_t offer, size_t i) const {
    const ManifestEntry& entry = receiver_.manifest.entries[i];
    return !entry.source.slices.empty() || sender_.manifest.entries[offer].shape == entry.shape;
  }

  std::string text_of(const Wrappers& of_sender, const Wrappers& of_receiver, const Prefix& prefix) const {
    std::vector<std::string> maps;
    if (const std::string map = map_of(of_receiver, prefix); !map.empty())
      maps.push_back(fmt::format("{} registers with map={}", receiver_.job, map));
    if (const std::string map = map_of(of_sender, {}); !map.empty())
      maps.push_back(fmt::format("{} registers with map={}", sender_.job, map));
    const std::string which = missing_ == 1      ? "the name matches"
                              : most_ < missing_ ? fmt::format("{} of the {} names match", most_, missing_)
                                                 : fmt::format("all {} names match", missing_);
    return fmt::format("{} if {}", which, fmt::join(maps, ", and "));
  }

  // As an expression of Python.
  static std::string map_of(const Wrappers& wrappers, const Prefix& prefix) {
    if (wrappers.empty() && !prefix.renames()) return {};
    if (wrappers.empty()) {
      std::vector<std::string> segments;
      for (const std::string_view segment : prefix.segments) segments.push_back(escaped(segment));
      const std::string rest = segments.empty()       ? "(.*)"
                               : segments.size() == 1 ? fmt::format(R"(({}\..*))", segments.front())
                                                      : fmt::format(R"(((?:{})\..*))", fmt::join(segments, "|"));
      return fmt::format(R"({{r"{}{}": r"{}\1"}})", escaped(prefix.from), rest, prefix.to);
    }
    const std::string names =
        wrappers.size() == 1 ? std::string(wrappers.front()) : fmt::format("({})", fmt::join(wrappers, "|"));
    const std::string bare = fmt::format(R"(re.sub(r"\b{}\.", "", name))", names);
    if (!prefix.renames()) return "lambda name, tensor: " + bare;
    if (prefix.from.empty()) return fmt::format(R"(lambda name, tensor: "{}" + {})", prefix.to, bare);
    return fmt::format(R"(lambda name, tensor: re.sub(r"^{}", "{}", {}))", escaped(prefix.from), prefix.to, bare);
  }

  const NamedSide& sender_;
  const NamedSide& receiver_;
  const std::vector<bool>& filled_;
  size_t missing_ = 0;
  size_t most_ = 0;
};

}  // namespace

std::string suggest_map(const NamedSide& sender, const NamedSide& receiver, const std::vector<bool>& filled) {
  return Search(sender, receiver, filled).suggestion();
}

}  // namespace tessera::bus
