// Python's view of _C_cuda: importing it runs the registrations that the library was linked from.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
