// Every operator of xstage, on one page: schemas only. Implementations register themselves for CPU
// (this library) and CUDA (_cuda_sm90) from the folder of their operator.
//
// Arguments named `plan` and `workspace` are wire messages (csrc/common/wire.h). No operator takes
// its workspace as a mutated Tensor: torch.compile may hand over a clone, and a clone is not mapped
// by peers. Every communicating operator returns something that its caller needs, since an
// operator whose result is unused may be removed from a graph.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(xstage, m) {
  // Facts about this binary.
  m.def("plan_fields(str kind) -> str");
  m.def("phase_names() -> str");
}

// The module is empty: importing it runs the static initialisers above.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr,
                                   nullptr,               nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
