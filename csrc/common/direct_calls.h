// The loop's calls of every step as plain functions of Python's C API: addresses and numbers in, no tensors and no
// dispatcher, which together take longer than a launch. syncfree_ext/_slots.py alone calls them, with what it has
// checked; for compiled code and all else there are the ops.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstring>
#include <exception>
#include <vector>

#include "loop.h"

namespace syncfree {

// Other threads of Python run while this is alive: a launch blocks while the queue of the device is full.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The result of call(integers), or null with a Python error set. All arguments are integers, at least `least` of them.
template <class Call>
PyObject* with_integers(PyObject* const* args, Py_ssize_t count, Py_ssize_t least, Call call) {
  try {
    if (count < least) throw std::invalid_argument(message("expected at least ", least, " integers, got ", count));
    std::vector<int64_t> integers(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      integers[size_t(i)] = PyLong_AsLongLong(args[i]);
      if (integers[size_t(i)] == -1 && PyErr_Occurred()) return nullptr;
    }
    return call(integers);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// publish(device, slots, rows, width, first_integer_column, ticket, *(source, kind, column) of each value): publish_
// without counters and constants, on the current stream of the device.
template <class Backend>
PyObject* publish_directly(PyObject*, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t kFixed = 6, kEach = 3;
  return with_integers(args, count, kFixed, [](const std::vector<int64_t>& integers) {
    constexpr const char* op = "syncfree: publish";
    const size_t total = (integers.size() - kFixed) / kEach;
    SF_CHECK(integers.size() == kFixed + total * kEach, op, ": expected ", int(kEach), " integers for each value");
    PublishParams p{};
    p.slots = reinterpret_cast<int64_t*>(integers[1]);
    p.rows = integers[2];
    p.width = integers[3];
    p.ticket = integers[5];
    SF_CHECK(p.slots && p.rows > 0 && p.width >= kSlotColumns && p.ticket >= 1, op, ": expected slots and a ticket");
    std::vector<PublishParams::Item> items(total);
    for (size_t i = 0; i < total; ++i) {
      const int64_t *item = integers.data() + kFixed + i * kEach, source = item[0], kind = item[1], column = item[2];
      SF_CHECK(source && kind >= 0 && kind <= int64_t(ScalarKind::b8) && column >= 0 && column < p.width - kSlotColumns,
               op, ": values[", i, "] must have an address, a kind and a column, got ", source, ", ", kind, " and ",
               column);
      items[i] = {};
      items[i].source = reinterpret_cast<const void*>(source);
      items[i].kind = ScalarKind(kind);
      items[i].column = int32_t(column);
      items[i].to_integer = column >= integers[4];
      SF_CHECK(!items[i].to_integer || !is_floating(items[i].kind), op, ": values[", i,
               "] must be of an integer dtype for an int64 column");
    }
    {
      const WithoutGil without_gil;
      Backend backend{int32_t(integers[0])};
      publish_items(backend, p, items);
    }
    return Py_NewRef(Py_None);
  });
}

// read(slots, rows, width, first_integer_column, ticket): the row of a ticket as a tuple of int and float; None where
// it has been overwritten, or has not arrived.
inline PyObject* read_directly(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return with_integers(args, count, 5, [](const std::vector<int64_t>& integers) -> PyObject* {
    const int64_t rows = integers[1], width = integers[2], first_integer = integers[3], ticket = integers[4];
    SF_CHECK(integers[0] && rows > 0 && width >= kSlotColumns && ticket >= 1, "syncfree: read: expected slots");
    std::vector<int64_t> row(static_cast<size_t>(width));
    copy_row(reinterpret_cast<const int64_t*>(integers[0]), rows, width, ticket, row.data());
    if (row[kSlotEnd] != ticket || row[kSlotBegin] != ticket) return Py_NewRef(Py_None);
    PyObject* out = PyTuple_New(width);
    for (int64_t i = 0; out && i < width; ++i) {
      double number;
      std::memcpy(&number, &row[size_t(i)], sizeof number);
      const bool is_float = i >= kSlotColumns && i - kSlotColumns < first_integer;
      PyObject* entry = is_float ? PyFloat_FromDouble(number) : PyLong_FromLongLong(row[size_t(i)]);
      if (!entry) {
        Py_DECREF(out);
        return nullptr;
      }
      PyTuple_SetItem(out, i, entry);
    }
    return out;
  });
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef python_method(const char* name, FastCall call) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
}

}  // namespace syncfree
