// The connections of a rank that sends with those that read from it, and what can be said of all of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "bus/session/source_link.h"
#include "peer/identity.h"

namespace tessera::bus {

using ReceiverLinks = std::map<Rank, std::unique_ptr<SourceLink>>;

bool reading(const ReceiverLinks& links);                 // one of them is, or fills a stream
bool begun(const ReceiverLinks& links, int64_t version);  // one reads it, or has read it. REQUIRES: version != 0
std::string who_has_not_taken(const ReceiverLinks& links, int64_t version);
std::string awaited(const ReceiverLinks& links, int64_t version);  // "inference/1 to take version 7"
Progress progress(const ReceiverLinks& links);
// A version is offered no longer: whoever reads is asked to stop, and runs that fill streams are aborted.
void take_back(const ReceiverLinks& links, int64_t version, const Status& status);

}  // namespace tessera::bus
