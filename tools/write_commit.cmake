# Writes the header that names the commit being built, unless it says so already:
#   cmake -DSOURCE_DIR=... -DHEADER=... -P write_commit.cmake
set(commit unknown)
if(EXISTS ${SOURCE_DIR}/.git)  # otherwise a repository around this folder would answer
  execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=* WORKING_DIRECTORY ${SOURCE_DIR}
                  RESULT_VARIABLE failed OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    set(commit ${answer})
  endif()
endif()
file(CONFIGURE OUTPUT ${HEADER} @ONLY CONTENT [[
#pragma once

namespace tessera {

inline constexpr char kCommit[] = "@commit@";  // "-dirty" behind it: with changes that are not committed

}  // namespace tessera
]])
