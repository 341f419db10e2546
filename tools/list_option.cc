#include "tools/list_option.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::tools {
namespace {

constexpr std::array<std::string_view, 7> kListFlags{"--layout", "--skip", "--checkpoint", "--verify",
                                                     "--src",    "--dst",  "--format"};

}  // namespace

std::vector<std::string> expand_lists(const std::vector<std::string>& args) {
  std::vector<std::string> expanded;
  std::string_view flag;   // the flag of the current values
  bool has_value = false;  // the next value already has a flag before it
  for (const std::string& arg : args) {
    if (arg.starts_with("-")) {
      const std::string_view name = std::string_view(arg).substr(0, arg.find('='));
      flag = std::ranges::find(kListFlags, name) != kListFlags.end() ? name : std::string_view();
      has_value = name.size() != arg.size();
    } else if (!flag.empty()) {
      if (has_value) expanded.emplace_back(flag);
      has_value = true;
    }
    expanded.push_back(arg);
  }
  return expanded;
}

}  // namespace tessera::tools
