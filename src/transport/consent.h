// Leave to read this process' memory, where the system asks for it.
#pragma once

namespace tessera {

// Holds as long as it lives (Transport::consent()).
class Consent {
 public:
  Consent() = default;
  virtual ~Consent() = default;
  Consent(const Consent&) = delete;
  Consent& operator=(const Consent&) = delete;
};

}  // namespace tessera
