// The kernel library as a Python module. It is empty: importing it registers the CUDA
// implementations of the operators.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda_sm90() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_cuda_sm90",
                                   nullptr,
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
