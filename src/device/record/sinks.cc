#include "device/record/sinks.h"

namespace tessera::device {

RecordSink sink_to(RankLog& log) {
  return [&log](std::unique_ptr<RecordBlock> block) {
    for (const Record& record : block->records()) log.append(record);
    return block;
  };
}

RecordSink sink_to(LogFile& file) {
  return [&file](std::unique_ptr<RecordBlock> block) {
    for (const Record& record : block->records()) file.append(record);
    file.flush();
    return block;
  };
}

}  // namespace tessera::device
