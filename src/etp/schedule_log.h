// The file that a rank's schedule is recorded in while its runtime lives. docs/formats/etp-log.md
#pragma once

#include <memory>
#include <string>

#include "collective/group.h"
#include "device/record/log_file.h"

namespace tessera::etp {

// The path that a pattern (RuntimeOptions::schedule_log) stands for. Throws Error(kInvalidArgument) for one that is the
// same on several ranks. Slashes of the group's name become dashes.
std::string schedule_log_path(const std::string& pattern, const collective::Group& group);

// Thread-compatible.
class ScheduleLog {
 public:
  // Creates the file and starts the recorder of the group's device. Throws what the disk says, and
  // Error(kAlreadyExists) if that recorder is on.
  ScheduleLog(const std::string& path, collective::Group& group);
  // Ends the recording. What the disk says becomes a warning.
  ~ScheduleLog();
  ScheduleLog(const ScheduleLog&) = delete;
  ScheduleLog& operator=(const ScheduleLog&) = delete;

 private:
  const std::string path_;
  device::Device& device_;
  device::LogFile file_;
};

}  // namespace tessera::etp
