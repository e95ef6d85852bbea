// Checks of the launchers without torch, against plain loops in double. Small enough for compute-sanitizer.
//   cmake --build build/cmake --target kernel_checks && ctest --test-dir build/cmake
//   kernel_checks [count rows moves scale select publish stores]; all of them without a name
// Exit code: the number of failed checks, 77 (ctest: skipped) without a device.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/common/keys.h"
#include "../../csrc/cuda/hopper/mbarrier.cuh"
#include "../../csrc/cuda/hopper/tma.cuh"
#include "../../csrc/cuda/kernels/launch.h"

using namespace syncfree;

namespace {

int failures = 0;
std::mt19937_64 rng;

#define CHECK(ok, ...)                                                                                                 \
  do {                                                                                                                 \
    if (!(ok)) {                                                                                                       \
      ++failures;                                                                                                      \
      std::printf("FAILED " __VA_ARGS__);                                                                              \
      std::printf("\n");                                                                                               \
    }                                                                                                                  \
  } while (0)

#define CUDA(call)                                                                                                     \
  do {                                                                                                                 \
    const cudaError_t error = (call);                                                                                  \
    if (error != cudaSuccess) {                                                                                        \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error));                             \
      std::exit(2);                                                                                                    \
    }                                                                                                                  \
  } while (0)

// Device memory that starts out as NaN (0xff bytes), so that what a kernel forgets to write shows.
template <class T>
struct Device {
  T* data = nullptr;
  size_t n;
  explicit Device(size_t count) : n(count) {
    CUDA(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
    CUDA(cudaMemset(data, 0xff, n * sizeof(T)));
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    CUDA(cudaMemcpy(data, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> out(n);
    CUDA(cudaMemcpy(out.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
};

double relative(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) error += (got[i] - want[i]) * (got[i] - want[i]), norm += want[i] * want[i];
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

std::vector<float> normal(size_t n, float scale = 1.f) {
  std::normal_distribution<float> draw(0.f, scale);
  std::vector<float> out(n);
  for (float& x : out) x = draw(rng);
  return out;
}

struct Targets {
  std::vector<int64_t> host;
  Device<int64_t> device;
  Device<double> counts{kCountSlots};
  Device<int32_t> rows;
  std::vector<int32_t> expected_valid, expected;

  Targets(std::vector<int64_t> t, int64_t classes, int64_t sequence, int64_t shift, const float* weight)
      : host(t), device(t), rows(t.size()) {
    const int64_t n = int64_t(t.size());
    std::vector<int32_t> ignored;
    for (int64_t i = 0; i < n; ++i) {
      const bool valid = i % sequence + shift < sequence && t[size_t(i + shift)] != -100;
      (valid ? expected_valid : ignored).push_back(int32_t(i));
    }
    expected = expected_valid;
    expected.insert(expected.end(), ignored.begin(), ignored.end());
    Device<char> scratch(size_t(count_scratch_bytes(n, classes)));
    CountParams p{};
    p.target = device.data, p.rows = n, p.sequence = sequence, p.shift = shift, p.num_classes = classes,
    p.ignore_index = -100;
    p.weight = weight, p.reduction = Reduction::mean, p.acc = DType::f32;
    p.counts = counts.data, p.row_index = rows.data, p.scratch = scratch.data;
    CUDA(launch_count(p, nullptr));
    CUDA(cudaDeviceSynchronize());
  }
};

std::vector<int64_t> draw_targets(int64_t n, int64_t classes, double ignored) {
  std::vector<int64_t> t(static_cast<size_t>(n));
  for (int64_t& x : t)
    x = std::uniform_real_distribution<>(0, 1)(rng) < ignored ? -100 : int64_t(rng() % uint64_t(classes));
  return t;
}

void check_count() {
  for (int64_t n : {0, 1, 31, 32, 33, 255, 257, 2047, 2048, 2049, 16384, 16385, 100003})
    for (double ignored : {0.0, 0.3, 1.0})
      for (int64_t shift : {0, 1})
        for (bool weighted : {false, true}) {
          const int64_t classes = 5000, sequence = n && n % 7 == 0 ? n / 7 : std::max<int64_t>(n, 1);
          const std::vector<float> weight = normal(size_t(classes));
          const Device<float> weight_device(weight);
          const Targets t(draw_targets(n, classes, ignored), classes, sequence, shift,
                          weighted ? weight_device.data : nullptr);
          double d = weighted ? 0 : double(t.expected_valid.size()), c = weighted ? 0 : double(classes);
          if (weighted) {
            for (int32_t i : t.expected_valid) d += weight[size_t(t.host[size_t(i + shift)])];
            for (float w : weight) c += w;
          }
          const std::vector<double> counts = t.counts.host();
          CHECK(t.rows.host() == t.expected, "count: rows, n=%ld ignored=%g shift=%ld", long(n), ignored, long(shift));
          CHECK(counts[kCountRows] == double(t.expected_valid.size()), "count: N, n=%ld", long(n));
          CHECK(std::fabs(counts[kCountWeight] - d) <= 1e-9 * (1 + std::fabs(d)), "count: D %g %g",
                counts[kCountWeight], d);
          CHECK(std::fabs(counts[kCountClasses] - c) <= 1e-9 * (1 + std::fabs(c)), "count: C %g %g",
                counts[kCountClasses], c);
        }
}

// Loss and gradient of the plain loss, in place in bfloat16 or float, over a chunk that is only partly live.
template <class Out>
void check_rows(int64_t classes, bool general) {
  const int64_t n = 37, first = 5, size = 32, pitch = (classes + 3) / 4 * 4;
  const float smoothing = general ? 0.1f : 0.f;
  const std::vector<float> z = normal(size_t(size * pitch), 3.f);
  const Targets t(draw_targets(n, classes, 0.3), classes, n, 0, nullptr);
  Device<float> logits(z), ce(n), zl(n), residue(size);
  RowParams p{};
  p.residue = residue.data;
  p.chunk = {t.counts.data, t.rows.data, first, size};
  p.options.logit_scale = 1.0, p.options.label_smoothing = smoothing, p.options.reduction = Reduction::mean;
  p.num_classes = p.total_classes = classes;
  p.logits = logits.data, p.logits_dtype = DType::f32, p.logits_pitch = pitch;
  p.target = t.device.data, p.acc = DType::f32, p.ce = ce.data, p.z = zl.data;
  p.grad = logits.data, p.grad_dtype = sizeof(Out) == 2 ? DType::bf16 : DType::f32,
  p.grad_pitch = pitch * 4 / int64_t(sizeof(Out));
  CUDA(launch_rows(p, nullptr));
  CUDA(cudaDeviceSynchronize());
  std::vector<Out> grad(size_t(size * p.grad_pitch));
  CUDA(cudaMemcpy(grad.data(), logits.data, grad.size() * sizeof(Out), cudaMemcpyDeviceToHost));
  const std::vector<float> losses = ce.host();
  std::vector<double> got, want, got_loss, want_loss;
  for (int64_t k = 0; k < size; ++k) {
    const int64_t row = t.expected[size_t(first + k)];
    const bool live = first + k < int64_t(t.expected_valid.size());
    double m = -INFINITY, sum = 0, mean = 0;
    for (int64_t j = 0; j < classes; ++j) m = std::max(m, double(z[size_t(k * pitch + j)]));
    for (int64_t j = 0; j < classes; ++j)
      sum += std::exp(z[size_t(k * pitch + j)] - m), mean += z[size_t(k * pitch + j)] / double(classes);
    const int64_t target = t.host[size_t(row)];
    const double lse = m + std::log(sum);
    got_loss.push_back(losses[size_t(row)]);
    want_loss.push_back(live ? (1 - smoothing) * (lse - z[size_t(k * pitch + target)]) + smoothing * (lse - mean)
                             : 0.0);
    for (int64_t j = 0; j < classes; ++j) {
      got.push_back(double(float(grad[size_t(k * p.grad_pitch + j)])));
      want.push_back(live ? std::exp(z[size_t(k * pitch + j)] - lse) - smoothing / double(classes) -
                                (j == target ? 1 - smoothing : 0)
                          : 0.0);
    }
  }
  CHECK(relative(got_loss, want_loss) < 2e-6, "rows: loss, V=%ld general=%d: %g", long(classes), general,
        relative(got_loss, want_loss));
  const double bound = sizeof(Out) == 2 ? 2.5e-3 : 1e-5;
  std::vector<double> got_lost, want_lost;
  for (int64_t k = 0; k < size; ++k) {
    got_lost.push_back(residue.host()[size_t(k)]);
    want_lost.push_back(0.0);
    for (int64_t j = k * classes; j < (k + 1) * classes; ++j) want_lost.back() += want[size_t(j)] - got[size_t(j)];
  }
  // Rounding a float32 gradient to float32 takes nothing; else the sum is as exact as the gradient before rounding.
  double lost = 0;
  for (int64_t k = 0; k < size; ++k)
    lost = std::max(lost, std::fabs(got_lost[size_t(k)] - (sizeof(Out) == 2 ? want_lost[size_t(k)] : 0.0)));
  CHECK(lost < 1e-5, "rows: residue, V=%ld general=%d size=%zu: %g", long(classes), general, sizeof(Out), lost);
  CHECK(relative(got, want) < bound, "rows: gradient, V=%ld general=%d size=%zu: %g", long(classes), general,
        sizeof(Out), relative(got, want));
}

void check_moves() {
  const int64_t n = 50, first = 8, size = 40, columns = 129;
  const Targets t(draw_targets(n, 10, 0.4), 10, n, 0, nullptr);
  const std::vector<float> x = normal(size_t(n * columns)), weight = normal(size_t(10 * columns)),
                           residue = normal(size_t(size));
  const Device<float> input(x), weights(weight), residues(residue), alpha(std::vector<float>{0.25f, 0.f, 1.f});
  Device<float> gathered(size_t(size * columns)), out(size_t(n * columns)), sums(columns);
  Device<char> scratch(size_t(column_sum_scratch_bytes(columns)));
  const Chunk chunk{t.counts.data, t.rows.data, first, size};
  const int64_t live = std::clamp<int64_t>(int64_t(t.expected_valid.size()) - first, 0, size);
  CUDA(launch_gather({chunk, input.data, DType::f32, columns, columns, gathered.data, DType::f32, columns}, nullptr));
  CUDA(launch_store_rows(
      {chunk, gathered.data, columns, columns, alpha.data, DType::f32, out.data, DType::f32, columns, nullptr},
      nullptr));
  CUDA(launch_column_sum(
      {chunk, gathered.data, DType::f32, columns, columns, false, DType::f32, sums.data, scratch.data}, nullptr));
  CUDA(cudaDeviceSynchronize());
  const std::vector<float> g = gathered.host(), o = out.host(), s = sums.host();
  bool same = true;
  std::vector<double> column(size_t(columns), 0.0);
  for (int64_t k = 0; k < size; ++k)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t row = t.expected[size_t(first + k)];
      const float want = k < live ? x[size_t(row * columns + j)] : 0.f;
      same = same && g[size_t(k * columns + j)] == want && o[size_t(row * columns + j)] == want * 0.25f;
      column[size_t(j)] += want;
    }
  CHECK(same, "moves: gather and store");
  CHECK(relative(std::vector<double>(s.begin(), s.end()), column) < 1e-5, "moves: column sums");

  constexpr int64_t kFirstClass = 3, kClasses = 5;  // a slice of the ten
  CUDA(launch_add_targets({chunk, t.device.data, 0, kFirstClass, kClasses, residues.data, DType::f32,
                           weights.data + kFirstClass * columns, DType::f32, columns, columns, gathered.data, columns},
                          nullptr));
  CUDA(cudaDeviceSynchronize());
  const std::vector<float> added = gathered.host();
  std::vector<double> got, want;
  for (int64_t k = 0; k < size; ++k)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t target = t.host[size_t(t.expected[size_t(first + k)])];
      const int64_t takes = target >= kFirstClass && target < kFirstClass + kClasses ? target : kFirstClass;
      got.push_back(added[size_t(k * columns + j)]);
      want.push_back(g[size_t(k * columns + j)] +
                     (k < live ? double(residue[size_t(k)]) * weight[size_t(takes * columns + j)] : 0.0));
    }
  CHECK(relative(got, want) < 1e-6, "moves: targets added, %g", relative(got, want));
}

void check_scale() {
  for (float factor : {1.f, 0.5f, -3.f})
    for (int64_t n : {1, 7, 1023, 65537}) {
      std::vector<float> x = normal(size_t(n));
      const uint32_t payload = 0x7fc12345u;  // a NaN whose bits must survive a factor of 1
      std::memcpy(&x[0], &payload, 4);
      Device<float> data(x);
      const Device<float> scale(std::vector<float>{factor});
      ScaleParams p{};
      p.count = 1, p.scale = scale.data, p.scale_dtype = DType::f32;
      p.items[0] = {data.data, DType::f32, 1, n, nullptr};
      CUDA(launch_scale(p, nullptr));
      CUDA(cudaDeviceSynchronize());
      const std::vector<float> y = data.host();
      bool same = factor != 1.f || std::memcmp(x.data(), y.data(), size_t(n) * 4) == 0;
      for (int64_t i = 1; i < n; ++i) same = same && y[size_t(i)] == x[size_t(i)] * factor;
      CHECK(same, "scale: n=%ld factor=%g", long(n), double(factor));
    }
}

// Keys of few values, so that ties decide; lengths around a tile of the block, and around those from which on another
// kernel runs; rows that start at any address.
void check_select() {
  for (int64_t length : {0, 1, 5, 4095, 4096, 4097, 8192, 8193, 20001, 20004, 32767, 32768, 32769})
    for (int values : {1, 3, 1 << 24})
      for (int64_t size : {0, 1, 100, 5000})
        for (KeyKind kind : {KeyKind::none, KeyKind::f32, KeyKind::bf16, KeyKind::f16, KeyKind::f64, KeyKind::philox}) {
          const int64_t rows = 3, offset = int64_t(rng() % 4);
          const size_t n = size_t(rows * length + offset);
          std::vector<uint8_t> mask(n);
          std::vector<double> keys(n);
          for (size_t i = 0; i < n; ++i)
            mask[i] = uint8_t(rng() % 3 ? 1 + rng() % 255 : 0),
            keys[i] = double(rng() % uint64_t(values)) / values - 0.5;
          const std::vector<int64_t> limit{-1, size / 2, size + 5}, ids{7, -3, int64_t(1) << 40};
          const Device<uint8_t> mask_device(mask);
          const Device<double> wide(keys);
          const std::vector<float> singles(keys.begin(), keys.end());
          std::vector<__nv_bfloat16> brains(n);
          std::vector<__half> halves(n);
          for (size_t i = 0; i < n; ++i) brains[i] = __float2bfloat16(singles[i]), halves[i] = __float2half(singles[i]);
          const Device<float> narrow(singles);
          const Device<__nv_bfloat16> brain(brains);
          const Device<__half> half(halves);
          const Device<int64_t> limit_device(limit), ids_device(ids);
          Device<int64_t> indices(size_t(rows * size)), count(static_cast<size_t>(rows));
          Device<uint8_t> valid(size_t(rows * size));
          SelectParams p{};
          p.mask = mask_device.data + offset, p.rows = rows, p.length = length, p.size = size, p.max_kept = size;
          p.limit = limit_device.data, p.key_kind = kind, p.seed = 99, p.row_ids = ids_device.data, p.fill_value = -9;
          p.keys = kind == KeyKind::f32    ? static_cast<const void*>(narrow.data + offset)
                   : kind == KeyKind::bf16 ? static_cast<const void*>(brain.data + offset)
                   : kind == KeyKind::f16  ? static_cast<const void*>(half.data + offset)
                                           : static_cast<const void*>(wide.data + offset);
          p.indices = indices.data, p.valid = reinterpret_cast<bool*>(valid.data), p.count = count.data;
          CUDA(launch_select(p, nullptr));
          CUDA(cudaDeviceSynchronize());
          const auto got = indices.host(), got_count = count.host();
          const auto got_valid = valid.host();
          for (int64_t r = 0; r < rows; ++r) {
            std::vector<int64_t> set;
            for (int64_t i = 0; i < length; ++i)
              if (mask[size_t(offset + r * length + i)]) set.push_back(i);
            const auto key = [&](int64_t i) {
              if (kind == KeyKind::none) return 0.0;
              if (kind == KeyKind::philox) return double(philox_keys(99, ids[size_t(r)], i / 4).word[i % 4]);
              const size_t at = size_t(offset + r * length + i);
              if (kind == KeyKind::bf16) return double(__bfloat162float(brains[at]));
              if (kind == KeyKind::f16) return double(__half2float(halves[at]));
              return kind == KeyKind::f32 ? double(singles[at]) : keys[at];
            };
            bool same = got_count[size_t(r)] == int64_t(set.size());
            std::stable_sort(set.begin(), set.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
            set.resize(size_t(std::clamp<int64_t>(limit[size_t(r)], 0, std::min(size, int64_t(set.size())))));
            std::sort(set.begin(), set.end());
            for (int64_t i = 0; i < size; ++i) {
              const bool kept = i < int64_t(set.size());
              same = same && got[size_t(r * size + i)] == (kept ? set[size_t(i)] : -9) &&
                     got_valid[size_t(r * size + i)] == (kept ? 1 : 0);
            }
            CHECK(same, "select: length=%ld values=%d size=%ld kind=%d row=%ld offset=%ld", long(length), values,
                  long(size), int(kind), long(r), long(offset));
          }
        }
}

// Into mapped memory, while the host reads it: a row whose two tickets agree is whole.
void check_publish() {
  constexpr int64_t kColumns = 90, kRows = 2, kWidth = kSlotColumns + kColumns, kTickets = 3000;
  int64_t *host = nullptr, *slots = nullptr;
  CUDA(cudaHostAlloc(&host, kRows * kWidth * sizeof(int64_t), cudaHostAllocMapped));
  CUDA(cudaHostGetDevicePointer(&slots, host, 0));
  std::memset(host, 0, kRows * kWidth * sizeof(int64_t));
  const Device<int64_t> counters(std::vector<int64_t>{0, 0, 0});
  PublishParams p{};
  p.slots = slots, p.rows = kRows, p.width = kWidth, p.counters = counters.data, p.origin = 1;
  p.first = p.last = true, p.count = kColumns;
  for (int i = 0; i < kColumns; ++i)
    p.items[i] = {counters.data, 0.0, ScalarKind::i64, i, true};  // tickets before this
  int64_t torn = 0, whole = 0;
  const auto read = [&](int64_t r) {
    const int64_t* row = host + r * kWidth;
    const int64_t end = __atomic_load_n(row + kSlotEnd, __ATOMIC_ACQUIRE);
    int64_t copy[kColumns];
    for (int64_t i = 0; i < kColumns; ++i) copy[i] = __atomic_load_n(row + kSlotColumns + i, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (end == 0 || __atomic_load_n(row + kSlotBegin, __ATOMIC_RELAXED) != end) return void(++torn);
    ++whole;
    for (int64_t i = 0; i < kColumns; ++i)
      CHECK(copy[i] == end - 1, "publish: ticket %ld column %ld holds %ld", long(end), long(i), long(copy[i]));
  };
  for (int64_t t = 0; t < kTickets; ++t) {
    CUDA(launch_publish(p, nullptr));
    for (int repeat = 0; repeat < 4; ++repeat) read(t % kRows), read((t + 1) % kRows);
  }
  CUDA(cudaDeviceSynchronize());
  for (int64_t r = 0; r < kRows; ++r) read(r);
  const std::vector<int64_t> after = counters.host();
  CHECK(after[0] == kTickets && after[1] == 0 && after[2] == kTickets, "publish: counters %ld %ld %ld", long(after[0]),
        long(after[1]), long(after[2]));
  CHECK(whole >= kRows, "publish: %ld whole rows, %ld torn", long(whole), long(torn));
  CUDA(cudaFreeHost(host));
}

constexpr int kBox = 64;

// Writes a box by one bulk tensor store, and nothing else: each row holds its number, so that swizzling changes nothing.
__global__ void store_box_kernel(const __grid_constant__ CUtensorMap map) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ alignas(1024) __nv_bfloat16 box[kBox * kBox];
  for (int i = threadIdx.x; i < kBox * kBox; i += blockDim.x) box[i] = __float2bfloat16(float(i / kBox));
  sm90::fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    sm90::tma_store<false>(&map, uint32_t(__cvta_generic_to_shared(box)), 0, 0);
    sm90::tma_store_commit();
    sm90::tma_store_wait<0>();
  }
#endif
}

__global__ void read_box_kernel(const __nv_bfloat16* box, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = __bfloat162float(box[i]);
}

// Reads what only a bulk tensor store has written. It shows whether a tool sees such stores (tools/sanitize.sh).
void check_stores() {
  int major = 0;
  CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) {
    std::printf("stores: skipped, needs compute capability 9.0\n");
    return;
  }
  __nv_bfloat16* box = nullptr;  // not filled by the host, which a tool would take for the only write
  CUDA(cudaMalloc(&box, kBox * kBox * sizeof(*box)));
  CUtensorMap map;
  CUDA(sm90::make_map(&map, {box, kBox, kBox, kBox, kBox, kBox, false}));
  const Device<float> out(kBox * kBox);
  store_box_kernel<<<1, 128>>>(map);
  read_box_kernel<<<kBox * kBox / 256, 256>>>(box, out.data);
  CUDA(cudaDeviceSynchronize());
  const std::vector<float> got = out.host();
  for (int i = 0; i < kBox * kBox; ++i)
    if (got[i] != float(i / kBox)) {
      CHECK(false, "stores: element %d is %g", i, got[i]);
      break;
    }
  CUDA(cudaFree(box));
}

void check_all_rows() {
  for (int64_t classes : {2, 17, 513, 8192, 32003})
    for (bool general : {false, true}) {
      check_rows<float>(classes, general);
      check_rows<__nv_bfloat16>(classes, general);
    }
}

struct Check {
  std::string name;
  void (*run)();
};

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device: skipped\n");
    return 77;
  }
  const uint64_t seed =
      std::getenv("SYNCFREE_SEED") ? std::strtoull(std::getenv("SYNCFREE_SEED"), nullptr, 10) : std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  rng.seed(seed);
  const std::vector<Check> checks{{"count", check_count},  {"rows", check_all_rows}, {"moves", check_moves},
                                  {"scale", check_scale},  {"select", check_select}, {"publish", check_publish},
                                  {"stores", check_stores}};
  const std::vector<std::string> names(argv + 1, argv + argc);
  size_t run = 0;
  for (const Check& check : checks)
    if (names.empty() || std::find(names.begin(), names.end(), check.name) != names.end()) check.run(), ++run;
  if (run != (names.empty() ? checks.size() : names.size())) {
    std::printf("there are count, rows, moves, scale, select, publish and stores\n");
    return 2;
  }
  std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return std::min(failures, 76);
}
