// Python's view of _C_cuda: importing it runs the registrations that the library was linked from.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <cuda_runtime_api.h>

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* self = PyModule_Create(&module);
  // What the import's driver check compares with.
  if (self) PyModule_AddIntConstant(self, "cuda_runtime_version", CUDART_VERSION);
  return self;
}
