// The name of an enumerator, from the compiler: an enum whose names are said elsewhere needs no list of its own.
#pragma once

#include <string_view>

namespace tessera {

// Not for use: what the compiler calls this function ends in the enumerator's qualified name.
template <auto value>
consteval auto enumerator_signature() {
  return __PRETTY_FUNCTION__;
}

// Whether one of its enum's enumerators has that value.
template <auto value>
inline constexpr bool kIsEnumerator =
    std::string_view(enumerator_signature<value>()).find("value = (") == std::string_view::npos;

// "Offer" of E::kOffer.
template <auto value>
  requires kIsEnumerator<value>
inline constexpr std::string_view kNameOf = [] {
  std::string_view text = enumerator_signature<value>();
  text = text.substr(0, text.find_first_of(";]", text.rfind("value = ")));
  return text.substr(text.rfind("::") + 3);
}();

}  // namespace tessera
