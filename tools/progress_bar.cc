#include "tools/progress_bar.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tessera::tools {
namespace {

constexpr Timeout kTerminalInterval = std::chrono::milliseconds(100);
constexpr Timeout kPlainInterval = std::chrono::seconds(5);
constexpr size_t kMaxBar = 30;
constexpr size_t kMinBar = 5;

size_t columns_of(std::FILE* stream) {
  winsize size{};
  return ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : size_t{80};
}

std::string bar_of(double share, size_t width) {
  const auto filled = static_cast<size_t>(share * static_cast<double>(width));
  std::string bar(filled, '=');
  if (filled < width) bar += '>';
  bar.resize(width, ' ');
  return "[" + bar + "]";
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  constexpr std::array kUnits{"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, digits, kUnits[unit]);
}

std::string progress_line(std::string_view label, const Progress& progress, size_t columns) {
  std::string line;
  if (progress.bytes_done == 0) {
    line = fmt::format("{}  waiting for the other job", label);
  } else {
    const double share =
        progress.bytes_total > 0
            ? std::clamp(static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total), 0.0, 1.0)
            : 0.0;
    const std::string figures =
        fmt::format("{:3.0f}%  {} of {}  {:.2f} GB/s", share * 100, format_bytes(progress.bytes_done),
                    format_bytes(progress.bytes_total), progress.gigabytes_per_second());
    const size_t taken = label.size() + figures.size() + 4;  // brackets and spaces
    const size_t room = columns > taken ? std::min(kMaxBar, columns - taken) : 0;
    line = room < kMinBar ? fmt::format("{} {}", label, figures)
                          : fmt::format("{} {} {}", label, bar_of(share, room), figures);
  }
  return line.substr(0, columns);
}

ProgressBar::ProgressBar(std::string label, std::FILE* stream)
    : label_(std::move(label)), stream_(stream), terminal_(::isatty(::fileno(stream)) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_ && terminal_) {
    std::fputs("\r\033[K", stream_);
    std::fflush(stream_);
  }
}

Timeout ProgressBar::interval() const {
  return terminal_ ? kTerminalInterval : kPlainInterval;
}

void ProgressBar::show(const Progress& progress) {
  const size_t columns = terminal_ ? columns_of(stream_) - 1 : size_t{200};
  const std::string line = progress_line(label_, progress, columns);
  std::fputs((terminal_ ? "\r\033[K" + line : line + "\n").c_str(), stream_);
  std::fflush(stream_);
  drawn_ = true;
}

}  // namespace tessera::tools
