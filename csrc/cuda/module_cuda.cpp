// Python's view of _C_cuda: importing it runs the registrations that the library was linked from.
#include "../common/direct_calls.h"
#include "backend.h"

namespace {

// stream(device): the handle of the stream that is current there; None while it is being captured.
PyObject* current_stream(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return syncfree::with_integers(args, count, 1, [](const std::vector<int64_t>& integers) {
    const syncfree::CudaBackend backend{int32_t(integers[0])};
    if (backend.is_capturing()) return Py_NewRef(Py_None);
    return PyLong_FromVoidPtr(backend.stream());
  });
}

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyMethodDef methods[] = {
      syncfree::python_method("publish", &syncfree::publish_directly<syncfree::CudaBackend>),
      syncfree::python_method("stream", &current_stream),
      {},
  };
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* self = PyModule_Create(&module);
  // What the import's driver check compares with.
  if (self) PyModule_AddIntConstant(self, "cuda_runtime_version", CUDART_VERSION);
  return self;
}
