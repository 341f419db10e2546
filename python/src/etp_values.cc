#include "etp_values.h"

#include <unistd.h>

#include <array>
#include <utility>

#include "base/fail.h"
#include "choice.h"
#include "dlpack_exchange.h"

namespace tessera::python {
namespace {

constexpr const char* kCapsuleName = "dltensor";  // a consumer renames it, and then calls the deleter itself
constexpr int32_t kHost = 1;

struct Lent {
  dlpack::ManagedTensor managed{};
  std::array<int64_t, 2> shape{};
  std::array<int64_t, 2> strides{};
  std::shared_ptr<void> keeper;
};

void give_back(dlpack::ManagedTensor* managed) {
  delete static_cast<Lent*>(managed->context);
}

void drop(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  managed->deleter(managed);
}

dlpack::DataType data_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(bits_of(dtype));
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
      return {.code = dlpack::kFloat, .bits = bits, .lanes = 1};
    case DType::kBF16:
      return {.code = dlpack::kBFloat, .bits = bits, .lanes = 1};
    case DType::kU8:
      return {.code = dlpack::kUnsigned, .bits = bits, .lanes = 1};
    default:
      fail_internal("no tensor of torch is made of {}", to_string(dtype));
  }
}

}  // namespace

void SignalHook::look(void*) {
  if (::gettid() != ::getpid()) return;
  const nb::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

nb::object dlpack_capsule(const void* data, int64_t rows, int64_t columns, DType dtype, std::shared_ptr<void> keeper) {
  auto lent = std::make_unique<Lent>();
  lent->shape = {rows, columns};
  lent->strides = {columns, 1};
  lent->keeper = std::move(keeper);
  lent->managed = {.tensor = {.data = const_cast<void*>(data),
                              .device = {.type = kHost, .id = 0},
                              .ndim = 2,
                              .dtype = data_type(dtype),
                              .shape = lent->shape.data(),
                              .strides = lent->strides.data(),
                              .byte_offset = 0},
                   .context = lent.get(),
                   .deleter = give_back};
  PyObject* capsule = PyCapsule_New(&lent->managed, kCapsuleName, drop);
  if (capsule == nullptr) throw nb::python_error();
  std::ignore = lent.release();
  return nb::steal(capsule);
}

etp::PrefetchMode prefetch_from(const std::string& name) {
  if (name == "auto") return etp::PrefetchMode::kAuto;
  constexpr Choice<etp::PrefetchMode> kModes[] = {{"on", etp::PrefetchMode::kOn}, {"off", etp::PrefetchMode::kOff}};
  return chosen("prefetch", name, kModes);
}

etp::WeightSpec spec_of(const std::string& name, int64_t rows, int64_t columns, const std::string& dtype,
                        const std::string& format, const std::optional<std::string>& compute,
                        const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen, bool native,
                        bool planes_only, bool copied) {
  const auto named = [](const std::optional<std::string>& each) {
    return each ? std::optional(parse_dtype(*each)) : std::nullopt;
  };
  return {.name = name,
          .rows = rows,
          .columns = columns,
          .dtype = parse_dtype(dtype),
          .format = format,
          .compute = named(compute),
          .accumulated = named(accumulated),
          .pad_for_alignment = pad_for_alignment,
          .frozen = frozen,
          .native = native,
          .planes_only = planes_only,
          .copied = copied};
}

}  // namespace tessera::python
