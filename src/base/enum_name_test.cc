#include "base/enum_name.h"

#include <cstdint>

namespace tessera {
namespace {

enum class Fruit : uint16_t { kApple = 1, kBloodOrange = 7 };

static_assert(kNameOf<Fruit::kApple> == "Apple");
static_assert(kNameOf<static_cast<Fruit>(7)> == "BloodOrange");
static_assert(kIsEnumerator<Fruit::kApple> && !kIsEnumerator<static_cast<Fruit>(2)>);

}  // namespace
}  // namespace tessera
