// Python's view of _C: importing it runs the registrations that the library was linked from.
#include "common/direct_calls.h"
#include "cpu/backend.h"

PyMODINIT_FUNC PyInit__C() {
  static PyMethodDef methods[] = {
      syncfree::python_method("publish", &syncfree::publish_directly<syncfree::CpuBackend>),
      syncfree::python_method("read", &syncfree::read_directly),
      {},
  };
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
