// Whether tensors still lie where they did: asked at every transfer, of every tensor.

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "dlpack_exchange.h"

namespace tessera::python {
namespace {

// Where some tensors of one library lay as it was made.
class TensorWatch {
 public:
  // REQUIRES: their type has the exchange API.
  TensorWatch(nb::object api, const nb::sequence& tensors)
      : capsule_(std::move(api)),
        api_(static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule_.ptr(), dlpack::kCapsule))) {
    if (api_ == nullptr) throw nb::python_error();
    for (const nb::handle tensor : tensors) {
      const dlpack::Tensor now = look(tensor);
      const auto ndim = static_cast<size_t>(now.ndim);
      first_dim_.push_back(dims_.size());
      dims_.insert(dims_.end(), now.shape, now.shape + ndim);
      dims_.insert(dims_.end(), now.strides, now.strides + ndim);
      places_.push_back({.data = now.data, .dtype = now.dtype, .ndim = now.ndim});
    }
  }

  // Whether all of them, in the same order, lie there still. (What does not answer has changed.)
  bool holds(const nb::list& tensors) const {
    if (tensors.size() != places_.size()) return false;
    for (size_t i = 0; i < places_.size(); ++i) {
      dlpack::Tensor now{};
      if (api_->tensor_from_py_object_no_sync(tensors[i].ptr(), &now) != 0) {
        PyErr_Clear();
        return false;
      }
      const Place& then = places_[i];
      if (now.data != then.data || now.ndim != then.ndim || now.dtype != then.dtype) return false;
      const auto ndim = static_cast<size_t>(now.ndim);
      const int64_t* const dims = dims_.data() + first_dim_[i];
      if (!std::equal(now.shape, now.shape + ndim, dims) || !std::equal(now.strides, now.strides + ndim, dims + ndim))
        return false;
    }
    return true;
  }

  static bool usable(nb::handle api) {
    auto* const found = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), dlpack::kCapsule));
    if (found == nullptr) {
      PyErr_Clear();
      return false;
    }
    return found->header.version.major == dlpack::kMajor && found->tensor_from_py_object_no_sync != nullptr;
  }

 private:
  struct Place {
    void* data;
    dlpack::DataType dtype;
    int32_t ndim;
  };

  dlpack::Tensor look(nb::handle tensor) const {
    dlpack::Tensor now{};
    if (api_->tensor_from_py_object_no_sync(tensor.ptr(), &now) != 0) throw nb::python_error();
    return now;
  }

  const nb::object capsule_;
  const dlpack::ExchangeApi* const api_;
  std::vector<Place> places_;
  std::vector<size_t> first_dim_;  // of each, in dims_
  std::vector<int64_t> dims_;      // sizes and strides of one after the other
};

}  // namespace

void bind_tensor_watch(nb::module_& module) {
  nb::class_<TensorWatch>(module, "TensorWatch",
                          "Whether tensors of a library with DLPack's C exchange API have moved.")
      .def(nb::init<nb::object, const nb::sequence&>(), nb::arg("api"), nb::arg("tensors"),
           nb::sig("def __init__(self, api: object, tensors: collections.abc.Sequence[object]) -> None"))
      .def("holds", &TensorWatch::holds, nb::arg("tensors"), nb::sig("def holds(self, tensors: list[object]) -> bool"),
           "Whether all of them lie where they did, with the same shapes and strides.")
      .def_static("usable", &TensorWatch::usable, nb::arg("api"), nb::sig("def usable(api: object) -> bool"),
                  "Whether such an API (Tensor.__dlpack_c_exchange_api__) is of a version that it knows.");
}

}  // namespace tessera::python
