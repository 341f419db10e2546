// Says which edge two unordered records lack.
#pragma once

#include <string>

#include "device/record/order.h"
#include "device/record/record.h"

namespace tessera::device {

struct OrderedRecord {
  const Record* record;
  OrderPoint point;
};

// "gather wte.weight (record 7)"
std::string record_text(const Record& record);

// `first` should happen before `second`: what its actor signals after it, and who does not wait for that.
std::string missing_edge(const ScheduleOrder& order, const OrderedRecord& first, const OrderedRecord& second);

}  // namespace tessera::device
