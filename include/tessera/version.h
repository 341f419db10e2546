// The release of Tessera that these headers belong to.
#pragma once

namespace tessera {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace tessera
