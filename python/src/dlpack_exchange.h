// DLPack's C exchange API: how a tensor library tells another where a tensor is without creating an object for it
// (https://dmlc.github.io/dlpack/latest/, DLPackExchangeAPI, since 1.2; the structures are an ABI). torch has it from
// 2.10 on, as Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace tessera::python::dlpack {

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;  // 1: host memory
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

inline constexpr uint8_t kUnsigned = 1;
inline constexpr uint8_t kFloat = 2;
inline constexpr uint8_t kBFloat = 4;

// What a capsule "dltensor" holds (DLManagedTensor).
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Fills `out`, which is valid while the object lives and is not changed; 0, or -1 with a Python error set.
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  void* current_work_stream;
};

inline constexpr const char* kCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajor = 1;

}  // namespace tessera::python::dlpack
