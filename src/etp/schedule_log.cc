#include "etp/schedule_log.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "device/device.h"
#include "device/record/sinks.h"
#include "layout/text_reader.h"

namespace tessera::etp {

std::string schedule_log_path(const std::string& pattern, const collective::Group& group) {
  if (group.size() > 1 && pattern.find("{rank}") == std::string::npos)
    fail(ErrorCode::kInvalidArgument,
         "all {} ranks would record their schedule in {}: put {} into TESSERA_ETP_LOG or schedule_log"_message,
         group.size(), tessera::quoted(pattern), "{rank}");
  std::string path = pattern;
  std::string name = group.name();
  std::ranges::replace(name, '/', '-');  // it is part of a file's name
  const std::array<std::pair<std::string_view, std::string>, 2> values = {
      std::pair{std::string_view("{rank}"), std::to_string(group.rank())},
      std::pair{std::string_view("{group}"), name}};
  for (const auto& [field, value] : values)
    for (size_t at = path.find(field); at != std::string::npos; at = path.find(field, at + value.size()))
      path.replace(at, field.size(), value);
  return path;
}

ScheduleLog::ScheduleLog(const std::string& path, collective::Group& group)
    : path_(path),
      device_(group.device()),
      file_(path, {.run = group.key(), .rank = group.rank(), .ranks = group.size()}) {
  device_.recorder().start(device::sink_to(file_));
  group.note_words();
}

ScheduleLog::~ScheduleLog() {
  try {
    device_.recorder().stop();
  } catch (const std::exception& error) {
    log_event(LogLevel::warn, "schedule_log.incomplete", {{"path", path_}},
              "the schedule log {} is not complete: {}"_message, path_, error.what());
  }
}

}  // namespace tessera::etp
