// data *= scale, or scale * row_scale, untouched where the factor is 1.
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

template <class Data>
void scale_row(Data* data, double factor, int64_t n, bool wide) {
  if (factor == 1) return;
  if (wide || std::is_same_v<Data, double>) {
    for (int64_t j = 0; j < n; ++j) data[j] = narrow<Data>(double(widen(data[j])) * factor);
  } else {
    const float f = float(factor);
    for (int64_t j = 0; j < n; ++j) data[j] = narrow<Data>(float(widen(data[j])) * f);
  }
}

}  // namespace

void scale_cpu(const ScaleParams& p) {
  double scale = 1;
  with_dtype(p.scale_dtype,
             [&](auto tag) { scale = double(widen(*static_cast<const typename decltype(tag)::type*>(p.scale))); });
  for (int index = 0; index < p.count; ++index) {
    const ScaleParams::Item& item = p.items[index];
    if (scale == 1 && !item.row_scale) continue;
    with_dtype(item.dtype, [&](auto tag) {
      using Data = typename decltype(tag)::type;
      Data* data = static_cast<Data*>(item.data);
      if (!item.row_scale) {
        parallel(item.rows * item.columns, 1,
                 [&](int64_t begin, int64_t end) { scale_row(data + begin, scale, end - begin, false); });
        return;
      }
      parallel(item.rows, item.columns, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          // The power of two of a row may be beyond what float holds once scale is in it, though the products are not:
          // double.
          scale_row(data + r * item.columns, scale * double(item.row_scale[r]), item.columns, true);
        }
      });
    });
  }
}

}  // namespace syncfree
