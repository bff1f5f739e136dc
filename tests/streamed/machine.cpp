#include "machine.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>

namespace streamed {

namespace {

thread_local int64_t current_stream = 0;
constexpr size_t kAlignment = 64;
constexpr int kScribble = 0xFF;  // NaN in every float format, and never a bool

void* new_memory(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, size) == 0, "out of memory");
  std::memset(memory, kScribble, size);
  return memory;
}

std::mutex pinned_mutex;
std::map<const void*, size_t> pinned;

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* base = size ? Machine::get().allocate(size) : nullptr;
    return {base, base, raw_deleter(), c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* base) { Machine::get().free(base); };
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* base = new_memory(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[base] = size;
    return {base, base, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* base) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(base);
      std::free(base);
    };
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) return false;
  auto [base, size] = *std::prev(after);
  return pointer < static_cast<const char*>(base) + std::max<size_t>(size, 1);
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

Span span_of(const at::Tensor& tensor) {
  size_t first = tensor.storage_offset() * tensor.itemsize(), last = first;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return {nullptr, 0, 0};
    last += (tensor.size(dim) - 1) * tensor.stride(dim) * tensor.itemsize();
  }
  return {tensor.storage().mutable_data(), first, last + tensor.itemsize()};
}

at::Tensor host_view(const at::Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)),
      c10::GetCPUAllocator(),
      true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

Machine& Machine::get() {
  static Machine* machine = new Machine();  // tensors may outlive any destructor
  return *machine;
}

int64_t Machine::current() const {
  return current_stream;
}

int64_t Machine::exchange(int64_t stream) {
  return std::exchange(current_stream, stream);
}

int64_t Machine::new_stream() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  streams_.emplace_back();
  return static_cast<int64_t>(streams_.size()) - 1;
}

Clock Machine::clock_of(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return streams_.at(stream);
}

void Machine::wait(int64_t stream, const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  join(streams_.at(stream), clock);
}

void Machine::launch(
    int64_t stream,
    const std::string& what,
    const std::vector<Span>& reads,
    const std::vector<Span>& writes) {
  std::vector<std::string> conflicts;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    Clock& clock = streams_.at(stream);
    join(clock, host_);
    if (clock.size() < streams_.size()) clock.resize(streams_.size());
    uint64_t time = ++clock[stream];
    for (bool writing : {false, true}) {
      for (const Span& span : writing ? writes : reads) {
        auto block = blocks_.find(span.base);
        if (block == blocks_.end()) continue;
        auto found = block->second.add({span.start, span.stop, stream, time, writing, what}, clock);
        conflicts.insert(conflicts.end(), found.begin(), found.end());
      }
    }
  }
  report_all(conflicts);
}

void* Machine::allocate(size_t size) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& cached = cached_[{current_stream, size}];
  void* base;
  if (cached.empty()) {
    base = new_memory(size);
  } else {
    base = cached.back();
    cached.pop_back();
  }
  Block& block = blocks_[base] = Block{size, current_stream, {}, {}};
  Clock clock = streams_.at(current_stream);
  join(clock, host_);
  std::vector<Access> owed;
  for (Access& debt : debts_[current_stream]) {
    if (covers(clock, debt.stream, debt.time)) continue;
    owed.push_back(debt);
    block.accesses.push_back(
        {0, size, debt.stream, debt.time, true, "in memory that was freed since, " + debt.what});
  }
  debts_[current_stream].swap(owed);
  return base;
}

void Machine::free(void* base) {
  if (base == nullptr) return;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Block& block = blocks_.at(base);
  Clock clock = streams_.at(block.stream);
  join(clock, host_);
  for (const Access& debt : block.debts(clock)) debts_[block.stream].push_back(debt);
  std::memset(base, kScribble, block.size);
  cached_[{block.stream, block.size}].push_back(base);
  blocks_.erase(base);
}

void Machine::record(void* base, int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto block = blocks_.find(base);
  if (block != blocks_.end()) block->second.recorded.insert(stream);
}

void Machine::synchronize(const std::string& what, int64_t stream) {
  synchronize(what, clock_of(stream));
}

void Machine::synchronize(const std::string& what, const Clock& clock) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    learn(clock);
  }
  report("synchronization", what);
}

void Machine::synchronize_device() {
  finish();
  synchronize("device", finished_);
}

bool Machine::query(const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Clock done = host_;
  join(done, finished_);
  if (!covers(done, clock)) return false;
  learn(clock);
  return true;
}

void Machine::finish() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const Clock& clock : streams_) join(finished_, clock);
}

void Machine::arrive_later(int64_t stream, const at::Tensor& host, const at::Tensor& values) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  deliveries_.push_back({stream, streams_.at(stream)[stream], host, values});
}

void Machine::learn(const Clock& clock) {
  join(host_, clock);
  std::vector<Delivery> later;
  for (const Delivery& delivery : deliveries_) {
    if (covers(host_, delivery.stream, delivery.time))
      delivery.host.copy_(delivery.values);
    else
      later.push_back(delivery);
  }
  deliveries_.swap(later);
}

void Machine::report_all(const std::vector<std::string>& conflicts) {
  for (const std::string& conflict : conflicts) report("conflict", conflict);
}

}  // namespace streamed
