// The one device of this process: its streams, its memory, and what the host knows of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>

#include "clocks.h"

namespace streamed {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// Bytes of a tensor: which block, from where to where.
struct Span {
  void* base;
  size_t start, stop;
};

class Machine {
 public:
  static Machine& get();

  // Streams. Number 0 is the default one.
  int64_t current() const;
  int64_t exchange(int64_t stream);
  int64_t new_stream();
  Clock clock_of(int64_t stream);
  void wait(int64_t stream, const Clock& clock);

  // Work of a stream, launched now: its accesses have one time.
  void launch(
      int64_t stream,
      const std::string& what,
      const std::vector<Span>& reads,
      const std::vector<Span>& writes);

  // Memory.
  void* allocate(size_t size);
  void free(void* base);
  void record(void* base, int64_t stream);

  // The host.
  void synchronize(const std::string& what, int64_t stream);  // reported: this is what a hot path must not do
  void synchronize(const std::string& what, const Clock& clock);
  void synchronize_device();
  bool query(const Clock& clock);
  void finish();  // let the device catch up; the host learns of it by asking
  void arrive_later(int64_t stream, const at::Tensor& host, const at::Tensor& values);

  std::function<void(const std::string& kind, const std::string& text)> report = [](auto&, auto&) {};

 private:
  struct Delivery {
    int64_t stream;
    uint64_t time;
    at::Tensor host, values;
  };

  void learn(const Clock& clock);  // with the lock held
  void report_all(const std::vector<std::string>& conflicts);

  std::recursive_mutex mutex_;
  std::vector<Clock> streams_{Clock{0}};
  Clock host_, finished_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> cached_;  // free memory, by stream and size
  std::map<int64_t, std::vector<Access>> debts_;  // by stream: [Note: Freed memory]
  std::vector<Delivery> deliveries_;
};

bool is_pinned(const void* pointer);
c10::Allocator* pinned_allocator();
c10::Allocator* device_allocator();

Span span_of(const at::Tensor& tensor);
// The same memory as a CPU tensor. Resized, it gets memory of its own.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace streamed
