// C++ internals for pytest: the chunk plan, pitches, and the formulas of a row in double. Test-only; never shipped.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../csrc/common/chunk_plan.h"
#include "../../csrc/common/formulas.h"
#include "../../csrc/common/workspace.h"
#include "../../csrc/cpu/backend.h"

namespace py = pybind11;
using namespace syncfree;

namespace {

// Valid rows in order, then the ignored ones: what count leaves for the stages after it.
std::vector<int32_t> compact(const std::vector<int64_t>& target, int64_t ignore_index, int64_t sequence, int64_t shift,
                             int64_t num_classes) {
  std::vector<int32_t> rows(target.size());
  double counts[kCountSlots];
  CountParams p{};
  p.target = target.data();
  p.rows = int64_t(target.size());
  p.sequence = sequence;
  p.shift = shift;
  p.num_classes = num_classes;
  p.ignore_index = ignore_index;
  p.reduction = Reduction::mean;
  p.acc = DType::f32;
  p.counts = counts;
  p.row_index = rows.data();
  count_cpu(p);
  return rows;
}

}  // namespace

PYBIND11_MODULE(syncfree_native, m) {
  m.doc() = "C++ internals of syncfree_ext, for its tests.";
  m.def(
      "plan_chunks",
      [](int64_t rows, int64_t row_bytes, int64_t chunk_rows, int64_t workspace_bytes, int64_t default_workspace,
         int64_t min_rows, int64_t multiple) {
        const ChunkPlan plan =
            plan_chunks(rows, row_bytes, chunk_rows, workspace_bytes, default_workspace, min_rows, multiple);
        return std::make_pair(plan.rows, plan.count);
      },
      py::arg("rows"), py::arg("row_bytes"), py::arg("chunk_rows") = 0, py::arg("workspace_bytes") = 0,
      py::arg("default_workspace") = int64_t(1) << 30, py::arg("min_rows") = 1024, py::arg("multiple") = 128);
  m.def(
      "live_rows",
      [](int64_t live, int64_t size, int64_t spare, int64_t group, int64_t index) {
        const LiveRows here(live, size, spare, group, index);
        return std::make_pair(here.first, here.count);
      },
      py::arg("live"), py::arg("size"), py::arg("spare"), py::arg("group"), py::arg("index"));
  m.def(
      "with_spare",
      [](int64_t rows, int64_t size, int64_t count, int64_t spare) {
        const ChunkPlan plan = with_spare({size, count}, rows, spare);
        return std::make_tuple(plan.rows, plan.count, plan.spare);
      },
      py::arg("rows"), py::arg("size"), py::arg("count"), py::arg("spare"));
  m.def(
      "carve",
      [](const std::vector<int64_t>& floats) {
        Carver measure;
        for (int64_t n : floats) measure.take<float>(n);
        std::vector<char> memory(size_t(measure.bytes()) + 1);
        Carver carver(memory.data());
        std::vector<int64_t> offsets;  // -1: nothing was taken
        for (int64_t n : floats) {
          const float* at = carver.take<float>(n);
          offsets.push_back(at ? reinterpret_cast<const char*>(at) - memory.data() : -1);
        }
        return std::make_tuple(measure.bytes(), carver.bytes(), offsets);
      },
      py::arg("floats"));
  m.def("logits_pitch", &logits_pitch, py::arg("num_classes"), py::arg("element_bytes"));
  m.def("compact", &compact, py::arg("target"), py::arg("ignore_index") = -100, py::arg("sequence"),
        py::arg("shift") = 0, py::arg("num_classes"));
  m.def(
      "half_exponent",
      [](double max_weight, double max_multiplier, double logit_scale, double z_weight) {
        double counts[kCountSlots] = {};
        counts[kMaxWeight] = max_weight;
        counts[kMaxMultiplier] = max_multiplier;
        return half_exponent(counts, logit_scale, z_weight);
      },
      py::arg("max_weight") = 1.0, py::arg("max_multiplier") = 1.0, py::arg("logit_scale") = 1.0,
      py::arg("z_weight") = 0.0);
  m.def("softcap_slope", &softcap_slope<double>, py::arg("s"), py::arg("softcap"));
}
