#include <exception>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/fail.h"
#include "base/thread.h"
#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/condition.h"
#include "device/device.h"
#include "tessera/etp.h"
#include "tessera/store.h"

namespace tessera::etp {
namespace {

collective::GroupOptions group_options(const ShardGroup::Options& options, int rank, int size, device::Device& device) {
  return {.rank = rank,
          .size = size,
          .name = options.name,
          .timeout = options.timeout,
          .device = &device,
          .slots = options.slots};
}

void check_rank(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    fail(ErrorCode::kInvalidArgument, "there is no rank {} in a group of {}"_message, rank, size);
}

void require_not_stopped(void* stop) {
  if (static_cast<std::stop_token*>(stop)->stop_requested())
    fail(ErrorCode::kCancelled, "interrupted while the group formed"_message);
}

}  // namespace

ShardGroup::ShardGroup(std::shared_ptr<collective::Group> group) : group_(std::move(group)) {}

ShardGroup ShardGroup::over(const Exchange& exchange, int rank, int size, const Options& options) {
  check_rank(rank, size);
  std::shared_ptr<device::Device> device = device::make_device(DeviceKind::kHost, {.rank = rank});
  ShardGroup made(collective::Group::form(exchange, group_options(options, rank, size, *device)));
  made.device_ = std::move(device);
  return made;
}

ShardGroup ShardGroup::over_store(Store& store, const std::string& key, int rank, int size, const Options& options,
                                  std::stop_token stop) {
  check_rank(rank, size);
  const device::WaitHook hook(require_not_stopped, &stop);  // for the waits after the bootstrap
  return over(collective::store_exchange(store, key, rank, size, options.timeout, stop), rank, size, options);
}

ShardGroup ShardGroup::single(const Options& options) {
  return std::move(in_process(1, options).front());
}

std::vector<ShardGroup> ShardGroup::in_process(int size, const Options& options) {
  check_rank(0, size);
  collective::InProcessExchange exchange(size);
  std::vector<std::shared_ptr<collective::Group>> groups(static_cast<size_t>(size));
  std::vector<std::shared_ptr<device::Device>> devices;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) devices.push_back(device::make_device(DeviceKind::kHost, {.rank = rank}));
  const auto form = [&](size_t rank) {
    try {
      collective::GroupOptions own = group_options(options, static_cast<int>(rank), size, *devices[rank]);
      own.in_process = true;
      groups[rank] =
          collective::Group::form(exchange.of_rank(static_cast<int>(rank), *devices[rank], options.timeout), own);
    } catch (...) {
      errors[rank] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < groups.size(); ++rank)
    threads.push_back(start_thread("tessera-form", [&form, rank] { form(rank); }));
  form(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error != nullptr) std::rethrow_exception(error);
  std::vector<ShardGroup> made;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    made.emplace_back(std::move(groups[rank]));
    made.back().device_ = std::move(devices[rank]);
  }
  return made;
}

int ShardGroup::rank() const {
  return group_->rank();
}

int ShardGroup::size() const {
  return group_->size();
}

void ShardGroup::close() {
  group_->close(group_->deadline());
}

void ShardGroup::leave() {
  try {
    group_->close(Deadline::after(Duration::zero()));
  } catch (const Error&) {  // others have not left yet, or have failed
  }
}

std::shared_ptr<const void> ShardGroup::keeper() const {
  return device_;
}

}  // namespace tessera::etp
