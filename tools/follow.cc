#include "tools/follow.h"

#include "tools/interrupt.h"
#include "tools/progress_bar.h"

namespace tessera::tools {

int64_t follow(Handle& handle, const std::string& label, Interrupt& interrupt) {
  const Interrupt::Scope on_signal(interrupt, [&handle] { handle.cancel(); });
  ProgressBar bar(label);
  while (!handle.wait_for(bar.interval())) bar.show(handle.progress());
  return handle.wait();
}

}  // namespace tessera::tools
