// Options that Python gives by name.
#pragma once

#include <string>
#include <utility>

#include "base/fail.h"

namespace tessera::python {

template <typename T>
using Choice = std::pair<const char*, T>;

template <typename T>
T chosen(const char* what, const std::string& name, const Choice<T> (&choices)[2]) {
  for (const auto& [known, value] : choices)
    if (name == known) return value;
  fail(ErrorCode::kInvalidArgument, "{} '{}': '{}' and '{}' are possible"_message, what, name, choices[0].first,
       choices[1].first);
}

template <typename T>
std::string name_of(T value, const Choice<T> (&choices)[2]) {
  return choices[0].second == value ? choices[0].first : choices[1].first;
}

}  // namespace tessera::python
