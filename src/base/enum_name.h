// The name of an enumerator, taken from the compiler, so that no enum needs a table of names.
#pragma once

#include <string_view>

namespace tessera {

// Internal: the compiler's name for this function ends in the enumerator's qualified name.
template <auto value>
consteval auto enumerator_signature() {
  return __PRETTY_FUNCTION__;
}

// Whether the enum has an enumerator with this value.
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
