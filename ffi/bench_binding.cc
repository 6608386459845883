// The marks of the benchmarks, read from Python.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cuda/bench/marks.h"

namespace py = pybind11;

void bind_bench(py::module_& m) {
  m.attr("bench_mark_slots") = directkv::bench::kMarkSlots;
  m.def(
      "bench_elapsed_ms",
      [](int slot_a, int slot_b) {
        std::string error;
        float ms;
        {
          py::gil_scoped_release release;  // waits for the device
          ms = directkv::bench::elapsed_ms(slot_a, slot_b, &error);
        }
        if (!error.empty()) throw std::runtime_error("bench_elapsed_ms: " + error);
        return ms;
      },
      py::arg("slot_a"), py::arg("slot_b"), "Milliseconds between two device marks.");
}
