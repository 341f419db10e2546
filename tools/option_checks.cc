#include "tools/option_checks.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "base/message.h"
#include "checkpoint/shown.h"

namespace tessera::tools {

OptionCheck whole_number(std::string what, int64_t most, int64_t least) {
  return [what = std::move(what), most, least](const std::string& text) -> std::string {
    int64_t value = 0;
    const char* const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    const bool number = end == last && !text.empty();
    if (number && error == std::errc() && value >= least && value <= most) return {};
    const bool too_large = number && !text.starts_with('-') && (error != std::errc() || value > most);
    return fmt::format("{} is a whole number from {}{} (not {})"_message, what, least,
                       too_large ? fmt::format(" to {}", most) : "", checkpoint::shown(text));
  };
}

OptionCheck seconds_between(double least, double most) {
  return [least, most](const std::string& text) -> std::string {
    double value = 0;
    const char* const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    if (end == last && error == std::errc() && value >= least && value <= most) return {};
    return fmt::format("{} to {} seconds are possible (not {})"_message, least, most, checkpoint::shown(text));
  };
}

OptionCheck not_empty() {
  return [](const std::string& text) {
    return text.empty() ? std::string("the value is empty: give one, or leave the option out"_message) : std::string();
  };
}

}  // namespace tessera::tools
