// Python's view of _C: importing it runs the registrations that the library was linked from.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
