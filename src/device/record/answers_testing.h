// Logs with known answers.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "device/record/check.h"
#include "device/record/logs_testing.h"

namespace tessera::device {

struct Answer {
  const char* name;
  int ranks;
  std::function<void(HandLogs&)> write;
  std::vector<std::string> conflicts;  // "first / second", by their names
};

inline void PrintTo(const Answer& answer, std::ostream* out) {
  *out << answer.name;
}

inline std::vector<std::string> names_of(const CheckReport& report) {
  std::vector<std::string> names;
  for (const Conflict& conflict : report.conflicts)
    names.push_back(conflict.first.operation + " / " + conflict.second.operation);
  return names;
}

// The same whatever the order of the logs.
inline void expect_answer(const Answer& answer) {
  HandLogs logs(answer.ranks);
  answer.write(logs);
  const CheckReport report = check_schedule(logs.all());
  EXPECT_THAT(report.faults, testing::IsEmpty());
  EXPECT_THAT(report.unfinished, testing::IsEmpty());
  EXPECT_EQ(report.unreached, 0u);
  EXPECT_EQ(names_of(report), answer.conflicts);
  for (const Conflict& conflict : report.conflicts) EXPECT_FALSE(conflict.missing.empty());
  std::ranges::reverse(logs.all());
  EXPECT_THAT(names_of(check_schedule(logs.all())), testing::UnorderedElementsAreArray(answer.conflicts));
}

}  // namespace tessera::device
