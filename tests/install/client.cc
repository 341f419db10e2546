// A small client of the installed library: plans a relayout, and checks the error of a bus without peers.
#include <tessera/bus.h>
#include <tessera/plan.h>

#include <cstdio>

int main() {
  const tessera::Plan plan = tessera::redistribute({.shape = {64, 32}, .dtype = tessera::DType::kBF16},
                                                   tessera::Layout::parse("4:S0"), tessera::Layout::parse("2@4-5:S1"));
  try {
    tessera::Bus bus({.job = "alone", .rank = 0, .world = 1, .store = "auto"});
    bus.pair({.name = "weights", .peer = "nobody", .timeout = std::chrono::milliseconds(200)});
    return 1;
  } catch (const tessera::Error& error) {
    if (error.code() != tessera::ErrorCode::kDeadlineExceeded) return 2;
  }
  std::printf("%zu routes\n", plan.routes.size());
  return plan.routes.size() == 8 && plan.stats.bytes_moved == plan.stats.bytes_lower_bound ? 0 : 3;
}
