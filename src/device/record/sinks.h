// Where a recorder's blocks go.
#pragma once

#include "device/record/log_file.h"
#include "device/record/rank_log.h"
#include "device/record/recorder.h"

namespace tessera::device {

// Into a log in memory, or onto the disk, where each block is written at once, so that the death of the process loses
// no more than RecordBlock::kBytes of records. The log outlives the recording.
RecordSink sink_to(RankLog& log);
RecordSink sink_to(LogFile& file);

}  // namespace tessera::device
