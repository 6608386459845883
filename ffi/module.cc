// The Python side of a native module: the FFI handlers as capsules, the registry of live caches,
// and what a build can say about itself. Compiled once for each platform; it never sees CUDA.
#include <pybind11/pybind11.h>

#include "buffer_registry.h"
#include "cpu/attend_plan.h"
#include "cuda/chunk_plan.h"
#include "targets.h"

namespace py = pybind11;

#ifdef DIRECTKV_WITH_CUDA
void bind_host_pool(py::module_& m);  // host_pool_binding.cc
void bind_bench(py::module_& m);      // bench_binding.cc
#else
#include "cpu/kernels.h"
#endif

namespace {

py::dict registrations() {
  py::dict targets;
#define DIRECTKV_ADD(name, symbol) targets[name] = py::capsule(reinterpret_cast<void*>(&symbol));
  DIRECTKV_TARGETS(DIRECTKV_ADD)
#ifdef DIRECTKV_WITH_CUDA
  DIRECTKV_CUDA_TARGETS(DIRECTKV_ADD)
  DIRECTKV_BENCH_TARGETS(DIRECTKV_ADD)
#endif
#undef DIRECTKV_ADD
  return targets;
}

}  // namespace

PYBIND11_MODULE(DIRECTKV_MODULE_NAME, m) {
  m.doc() = "Native kernels of directkv_jax; use the Python functions instead.";
  m.def("registrations", &registrations, "FFI target name -> handler capsule.");
  m.def("cpu_workspace_bytes", &directkv::cpu::attend_workspace_bytes, py::arg("batch"),
        py::arg("query_tokens"), py::arg("query_heads"), py::arg("kv_heads"), py::arg("head_dim"),
        py::arg("max_pages"), "Bytes of the workspace result of attend on the CPU.");
  m.def("cuda_workspace_bytes", &directkv::cuda::workspace_bytes, py::arg("itemsize"),
        py::arg("batch"), py::arg("query_tokens"), py::arg("query_heads"), py::arg("kv_heads"),
        py::arg("head_dim"), py::arg("page_size"), py::arg("max_pages"), py::arg("host"),
        "The same on CUDA.");
  m.def("register_buffer", [](uintptr_t address, size_t bytes) {
    directkv::register_buffer(reinterpret_cast<const void*>(address), bytes);
  });
  m.def("unregister_buffer", [](uintptr_t address) {
    directkv::unregister_buffer(reinterpret_cast<const void*>(address));
  });
#ifdef DIRECTKV_WITH_CUDA
  bind_host_pool(m);
  bind_bench(m);
  m.attr("cuda_architectures") = DIRECTKV_CUDA_ARCHITECTURES;
#else
  m.def("isa_name", &directkv::cpu::isa_name, "Instruction set of the chosen kernels.");
  m.def("isa_list", &directkv::cpu::isa_list, "Instruction sets of this build.");
#endif
}
