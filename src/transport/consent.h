// Permission to read this process's memory, where the system requires it.
#pragma once

namespace tessera {

// Granted until it is destroyed (Transport::consent()).
class Consent {
 public:
  Consent() = default;
  virtual ~Consent() = default;
  Consent(const Consent&) = delete;
  Consent& operator=(const Consent&) = delete;
};

}  // namespace tessera
