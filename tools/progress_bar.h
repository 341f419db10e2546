// Shows the progress of a transfer: a bar on a terminal, otherwise a plain line every few seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "tessera/bus.h"

namespace tessera::tools {

// "0 B", "999 B", "1.50 kB", "12.3 MB", "4.20 GB": decimal units, three digits.
std::string format_bytes(int64_t bytes);

// One line of at most `columns`: "recv weights [=====>    ]  45%  1.20 of 2.60 GB  3.4 GB/s". Without enough room the
// bar is left out.
std::string progress_line(std::string_view label, const Progress& progress, size_t columns);

// Writes to stderr. Not thread-safe.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label, std::FILE* stream = stderr);
  ~ProgressBar();  // wipes the bar
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // How long to wait before the next show().
  Timeout interval() const;
  void show(const Progress& progress);

 private:
  std::string label_;
  std::FILE* stream_;
  bool terminal_;
  bool drawn_ = false;
};

}  // namespace tessera::tools
