// HostPool in Python: page-locked memory that JAX imports through DLPack without a copy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer_registry.h"
#include "dlpack.h"
#include "host_pool.h"

namespace py = pybind11;

namespace {

// One exported tensor. Freed by DLPack's deleter, on whatever thread drops the last buffer: it is
// plain C++ and takes no GIL.
struct Export {
  directkv::dlpack::ManagedTensor tensor{};
  std::vector<int64_t> shape;
  directkv::HostPool* pool = nullptr;

  ~Export() {
    if (!pool) return;
    directkv::unregister_buffer(directkv::host_pool_data(pool));
    directkv::host_pool_destroy(pool);
  }
};

void delete_export(directkv::dlpack::ManagedTensor* tensor) {
  delete static_cast<Export*>(tensor->manager_ctx);
}

directkv::dlpack::DataType to_dlpack(const std::string& dtype) {
  if (dtype == "bfloat16") return {directkv::dlpack::kBfloat, 16, 1};
  if (dtype == "float16") return {directkv::dlpack::kFloat, 16, 1};
  if (dtype == "float32") return {directkv::dlpack::kFloat, 32, 1};
  throw py::type_error("a pool holds bfloat16, float16 or float32, but got " + dtype);
}

class HostPool {
 public:
  HostPool(std::vector<int64_t> shape, const std::string& dtype, int device) {
    auto made = std::make_unique<Export>();
    const auto type = to_dlpack(dtype);
    const size_t bytes = std::accumulate(shape.begin(), shape.end(), size_t{type.bits} / 8,
                                         [](size_t a, int64_t b) { return a * b; });
    std::string error;
    {
      py::gil_scoped_release release;  // touching and locking takes seconds
      made->pool = directkv::host_pool_create(bytes, device, &error);
    }
    if (!made->pool) {
      PyErr_SetString(PyExc_MemoryError, error.c_str());
      throw py::error_already_set();
    }
    directkv::register_buffer(directkv::host_pool_data(made->pool), bytes);
    made->shape = std::move(shape);
    auto& t = made->tensor.tensor;
    t.data = directkv::host_pool_data(made->pool);
    t.device = {directkv::dlpack::kCudaHost, device};
    t.ndim = static_cast<int32_t>(made->shape.size());
    t.dtype = type;
    t.shape = made->shape.data();
    made->tensor.manager_ctx = made.get();
    made->tensor.deleter = &delete_export;
    device_ = device;
    export_ = std::move(made);
  }

  // The consumer takes ownership; a pool is exported once.
  py::object dlpack(const py::kwargs&) {
    if (!export_) throw py::value_error("this pool was already exported");
    auto* tensor = &export_.release()->tensor;
    return py::reinterpret_steal<py::object>(
        PyCapsule_New(tensor, "dltensor", [](PyObject* capsule) {
          if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // consumed and renamed
          auto* unused = static_cast<directkv::dlpack::ManagedTensor*>(
              PyCapsule_GetPointer(capsule, "dltensor"));
          unused->deleter(unused);
        }));
  }

  py::tuple device() const { return py::make_tuple(int{directkv::dlpack::kCudaHost}, device_); }

 private:
  std::unique_ptr<Export> export_;
  int device_ = 0;
};

}  // namespace

void bind_host_pool(py::module_& m) {
  py::class_<HostPool>(m, "HostPool", "Page-locked host memory, owned by the array made from it.")
      .def(py::init<std::vector<int64_t>, const std::string&, int>(), py::arg("shape"),
           py::arg("dtype"), py::arg("device"))
      .def("__dlpack__", &HostPool::dlpack)
      .def("__dlpack_device__", &HostPool::device);
  m.def("host_memory_limit", [] {
    const auto limit = directkv::host_memory_limit();
    py::dict result;
    result["available"] = limit.available;
    result["limit"] = limit.limit;
    result["source"] = limit.source;
    return result;
  });
}
