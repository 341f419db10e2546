// Detects tensors that have moved; checked for every tensor at each transfer.

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "dlpack_exchange.h"

namespace tessera::python {
namespace {

// The addresses of some torch tensors at its construction. All checks of a transfer are done in one pass over the
// tensors, which have left the caches by then.
class TensorWatch {
 public:
  // `tensors` are what `sources` return now, DTensors or plain ones; `storage_of` returns the storage of a plain one.
  // REQUIRES: their type has the exchange API.
  TensorWatch(const nb::object& api, nb::object storage_of, const nb::list& sources, const nb::list& tensors)
      : capsule_(api),
        api_(static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule_.ptr(), dlpack::kCapsule))),
        storage_of_(std::move(storage_of)) {
    if (api_ == nullptr) throw nb::python_error();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const nb::handle tensor = tensors[i];
      const bool distributed = nb::hasattr(tensor, local_);
      const nb::object local = distributed ? nb::object(tensor.attr(local_)) : nb::borrow(tensor);
      dlpack::Tensor now{};
      if (api_->tensor_from_py_object_no_sync(local.ptr(), &now) != 0) throw nb::python_error();
      const auto ndim = static_cast<size_t>(now.ndim);
      places_.push_back({.source = nb::borrow(sources[i]),
                         .spec = distributed ? nb::object(tensor.attr(spec_)) : nb::object(),
                         .data = now.data,
                         .dtype = now.dtype,
                         .ndim = now.ndim,
                         .first_dim = dims_.size()});
      dims_.insert(dims_.end(), now.shape, now.shape + ndim);
      dims_.insert(dims_.end(), now.strides, now.strides + ndim);
    }
  }

  // (their storages, the tensors whose version counters count) if none has moved; otherwise None.
  nb::object hold() const {
    nb::list storages, counted, locals;
    for (const Place& then : places_) {
      const nb::object tensor = nb::steal(PyObject_CallNoArgs(then.source.ptr()));
      if (!tensor.is_valid()) return changed();
      nb::object local = tensor;
      if (then.spec.is_valid()) {
        const nb::object spec = nb::steal(PyObject_GetAttr(tensor.ptr(), spec_.ptr()));
        if (spec.ptr() != then.spec.ptr()) return changed();
        local = nb::steal(PyObject_GetAttr(tensor.ptr(), local_.ptr()));
        if (!local.is_valid()) return changed();
        locals.append(local);
      }
      if (!lies_there(then, local)) return changed();
      nb::object storage = nb::steal(PyObject_CallFunctionObjArgs(storage_of_.ptr(), local.ptr(), nullptr));
      if (!storage.is_valid()) return changed();
      storages.append(std::move(storage));
      counted.append(tensor);
    }
    if (!locals.empty()) counted.extend(locals);
    return nb::make_tuple(storages, counted);
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
    nb::object source;
    nb::object spec;  // of a DTensor
    void* data;
    dlpack::DataType dtype;
    int32_t ndim;
    size_t first_dim;  // in dims_
  };

  static nb::object changed() {
    PyErr_Clear();
    return nb::none();
  }

  bool lies_there(const Place& then, nb::handle tensor) const {
    dlpack::Tensor now{};
    if (api_->tensor_from_py_object_no_sync(tensor.ptr(), &now) != 0) return false;
    if (now.data != then.data || now.ndim != then.ndim || now.dtype != then.dtype) return false;
    const auto ndim = static_cast<size_t>(now.ndim);
    const int64_t* const dims = dims_.data() + then.first_dim;
    return std::equal(now.shape, now.shape + ndim, dims) && std::equal(now.strides, now.strides + ndim, dims + ndim);
  }

  const nb::object capsule_;
  const dlpack::ExchangeApi* const api_;
  const nb::object storage_of_;
  const nb::object local_ = nb::steal(PyUnicode_InternFromString("_local_tensor"));
  const nb::object spec_ = nb::steal(PyUnicode_InternFromString("_spec"));
  std::vector<Place> places_;
  std::vector<int64_t> dims_;  // sizes and strides of all tensors, one after another
};

}  // namespace

void bind_tensor_watch(nb::module_& module) {
  nb::class_<TensorWatch>(module, "TensorWatch",
                          "Detects whether tensors of a library with DLPack's C exchange API have moved.")
      .def(nb::init<const nb::object&, nb::object, const nb::list&, const nb::list&>(), nb::arg("api"),
           nb::arg("storage_of"), nb::arg("sources"), nb::arg("tensors"),
           nb::sig("def __init__(self, api: object, storage_of: collections.abc.Callable[[object], object], sources: "
                   "list[collections.abc.Callable[[], object]], tensors: list[object]) -> None"))
      .def("hold", &TensorWatch::hold, nb::sig("def hold(self) -> tuple[list[object], list[object]] | None"),
           "(storages, tensors whose version counters count) of the tensors that the sources return, if their "
           "addresses, shapes and strides are unchanged; otherwise None.")
      .def_static("usable", &TensorWatch::usable, nb::arg("api"), nb::sig("def usable(api: object) -> bool"),
                  "Whether this version of the API (Tensor.__dlpack_c_exchange_api__) is known here.");
}

}  // namespace tessera::python
